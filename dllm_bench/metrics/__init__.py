"""Metrics by name, intervals, and paired tests, all computed from stored samples."""
