"""Drafters: what is proposed after the committed tokens, one file per method."""
