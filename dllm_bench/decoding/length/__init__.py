"""Verification length: how many draft tokens of each request are verified in a round."""
