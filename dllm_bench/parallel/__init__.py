"""Several processes that decode together: branches, tensors, and how they meet."""
