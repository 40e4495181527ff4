"""Pieces that turn logits into candidate tokens and confidences."""
