"""How fast the decoding loop is, in numbers of one call on one machine (`make perf`)."""
