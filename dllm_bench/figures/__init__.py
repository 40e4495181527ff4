"""Figures as data: points from stored records, drawn with matplotlib."""
