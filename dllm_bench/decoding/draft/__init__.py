"""Drafts: what is proposed after the committed tokens; one file per published method."""
