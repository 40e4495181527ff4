"""Tables of measured values, computed from records, next to the reported values."""
