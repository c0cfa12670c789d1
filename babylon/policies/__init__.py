"""Checkpoints on disk: loading, digests, tokenizers, layers, durable writes."""
