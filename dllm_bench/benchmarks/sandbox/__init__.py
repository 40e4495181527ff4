"""Running model-written programs in a restricted child process."""
