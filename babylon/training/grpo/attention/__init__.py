"""Attention over a prefix tree: a token sees only the earlier tokens of its own call."""
