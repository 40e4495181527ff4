"""Pieces that mask committed positions again or overwrite them."""
