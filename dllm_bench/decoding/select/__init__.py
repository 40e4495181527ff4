"""Confidences -> positions to commit."""
