"""Pieces that evaluate several candidate states in one forward."""
