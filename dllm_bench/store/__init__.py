"""Run specifications, their identity, and the records stored on disk."""
