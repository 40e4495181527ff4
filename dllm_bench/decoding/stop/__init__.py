"""When no more blocks open, when a request is over."""
