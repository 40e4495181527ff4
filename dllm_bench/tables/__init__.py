"""From records to a table beside the reported values."""
