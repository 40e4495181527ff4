"""Programs that run inside the sandboxed child. They are read as text and never imported."""
