"""Language models as functions from tokens to logits: checkpoints, caches, drafters, filters."""
