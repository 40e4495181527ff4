"""The two decoding loops, masked and speculative, and what they compute with."""
