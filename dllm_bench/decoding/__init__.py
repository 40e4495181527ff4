"""The decoding loops, masked, speculative and canvas, and what they compute with."""
