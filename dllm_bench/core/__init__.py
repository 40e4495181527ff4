"""Vocabulary of the package: requests, state, traces and the contracts of the pieces."""
