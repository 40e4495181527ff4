"""Speculative decoding under load, simulated: an engine with seats, step times, many requests."""
