"""Execute one run, from its specification to a sealed record."""
