"""Stored runs as text for the terminal."""
