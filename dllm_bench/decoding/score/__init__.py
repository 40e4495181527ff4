"""Logits -> candidate ids and confidences."""
