"""Pieces that choose which positions are committed."""
