"""Verification lengths: how much of a proposal the target is asked about."""
