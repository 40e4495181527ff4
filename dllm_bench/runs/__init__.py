"""Executing one run, from its spec to a sealed record."""
