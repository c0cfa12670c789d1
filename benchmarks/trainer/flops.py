"""Floating-point operations of an iteration, and this machine's rate of matrix products.

Per iteration, forward and backward: ``c N U + c_h d V M + 14 L H d_h S``, with U tokens through the
layers, N weights in them, M positions through the head, S the sum over tokens of the keys each of
them sees (itself included), L layers, H heads of width d_h, model width d, vocabulary V.

``c`` is 6 for trained weights and 4 for frozen weights (no weight gradient). Adapters are trained.
``c_h`` is 6 or 4 in the same way. 14 is 4 forward and 10 backward, where scores are computed again.
Only keys in a token's past count, even if a kernel computes more.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.trainer.models import ModelShape, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens forwarded, positions scored by the head, and key-query pairs of one head."""

    tokens: int
    scored: int
    pairs: int

    def __add__(self, other: "Work") -> "Work":
        return Work(
            tokens=self.tokens + other.tokens,
            scored=self.scored + other.scored,
            pairs=self.pairs + other.pairs,
        )


NOTHING = Work(tokens=0, scored=0, pairs=0)


def rows_work(lengths: Iterable[int], scored: int) -> Work:
    """Work of rows that run alone. Padding counts if ``lengths`` include it."""
    lengths = list(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return Work(tokens=sum(lengths), scored=scored, pairs=pairs)


def tree_work(sequences: Iterable[Iterable[int]], scored: int) -> Work:
    """Work of every distinct prefix once. Its last token sees all keys of the prefix."""
    root: dict[int, dict[int, object]] = {}
    tokens = pairs = 0
    for sequence in sequences:
        node: dict[int, dict[int, object]] = root
        for depth, token in enumerate(sequence, start=1):
            if token not in node:
                node[token] = {}
                tokens, pairs = tokens + 1, pairs + depth
            node = node[token]  # type: ignore[assignment]
    return Work(tokens=tokens, scored=scored, pairs=pairs)


def flop(shape: ModelShape, work: Work, tuning: Tuning) -> float:
    """Floating-point operations of one forward and backward pass."""
    weights, adapters = shape.layers * shape.layer_weights, shape.layers * shape.adapter_weights
    dense = 6 * weights if tuning == "full" else 4 * weights + 6 * adapters
    head = (6 if tuning == "full" else 4) * shape.hidden * shape.vocab
    attention = 14 * shape.layers * shape.attention
    return float(dense * work.tokens + head * work.scored + attention * work.pairs)


def matmul_rate(
    size: int = 1536, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> float:
    """FLOP/s of one square matrix product, on the threads that training uses."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)
    repeats = 4
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right)
    _synchronize(device)
    return float(repeats * 2 * size**3 / (time.perf_counter() - started))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
