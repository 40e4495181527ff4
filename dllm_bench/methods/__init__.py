"""Published methods, one file per work, and pieces that several works share (`common`, `caches`,
...)."""
