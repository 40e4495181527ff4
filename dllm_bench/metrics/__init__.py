"""Numbers by name, intervals and paired tests."""
