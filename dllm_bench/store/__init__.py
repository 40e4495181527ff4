"""The identity of runs, and their stored files."""
