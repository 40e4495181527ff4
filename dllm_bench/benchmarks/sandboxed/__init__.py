"""Programs that run inside the sandboxed child; read as text, never imported by the parent."""
