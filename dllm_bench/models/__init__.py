"""Checkpoints as functions from tokens to logits."""
