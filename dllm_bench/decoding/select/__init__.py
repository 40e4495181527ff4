"""Which positions are committed, given their confidences."""
