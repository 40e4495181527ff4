"""Published methods, one file a work, and what several works share (`common`, `caches`, ...)."""
