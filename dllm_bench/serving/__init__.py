"""Many requests: speculative decoding under load, simulated; a served engine, asked over HTTP."""
