"""Which blocks of the canvas are open, and when the next one opens."""
