"""The two decoding loops, masked and speculative, and their pieces: one file per published idea."""
