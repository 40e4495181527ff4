"""Which blocks are open."""
