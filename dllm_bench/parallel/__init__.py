"""Several processes that decode one request: branch parallelism and tensor parallelism."""
