"""Pieces that open the blocks of the canvas."""
