"""Published methods by subject, and pieces that several works share (`common`, `caches`, ...)."""
