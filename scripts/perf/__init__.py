"""Measure how fast the decoding loops are on this machine (`make perf`)."""
