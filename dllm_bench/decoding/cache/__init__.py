"""Pieces that plan what a forward feeds, reads from a cache and keeps."""
