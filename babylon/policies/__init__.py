"""Checkpoints on disk: loading, digests, tokenizers, layers, durable writes."""

import babylon.core.openmp  # noqa: F401
