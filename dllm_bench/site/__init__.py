"""The static HTML report of everything in a results folder."""
