"""From a specification to a stored record."""
