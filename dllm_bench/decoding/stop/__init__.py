"""Pieces that say when no more blocks open and when a request is finished."""
