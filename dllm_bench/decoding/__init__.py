"""The decoding loops (masked, speculative, canvas) and their numerics."""
