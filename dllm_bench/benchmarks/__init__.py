"""Benchmarks: requests, and the grading of their answers."""
