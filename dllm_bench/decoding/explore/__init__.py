"""Candidate states that share a forward."""
