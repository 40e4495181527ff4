"""From records to figures: points as csv, and one drawing of them as svg and png."""
