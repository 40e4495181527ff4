"""Serving: models behind an HTTP server, and simulated load on speculative decoding."""
