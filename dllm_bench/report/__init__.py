"""Stored runs as lines for the terminal and as a static site with a trace viewer."""
