"""Who attends to whom when a part of a prefix tree is laid out as one sequence.

Segments stand depth first, so the descendants of a token are one interval: query ``i`` sees key
``j`` exactly if ``first[j] <= i < last[j]``. Keys are the portion's own tokens, then those of
ancestors that an earlier portion forwarded. ``[Q]``, ``[K]`` count queries and keys, K >= Q.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128  # tokens below which segments are cheaper to attend under one mask than one by one


@dataclass(frozen=True, slots=True)
class Span:
    """One segment: its own tokens ``[start, end)``; with its descendants, ``[start, last)``."""

    start: int
    end: int
    last: int

    @property
    def leaf(self) -> bool:
        return self.end == self.last


@dataclass(frozen=True, slots=True)
class External:
    """Keys ``[start, end)`` of an ancestor, seen by all queries ``[first, last)``."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Local:
    """Queries ``[start, end)`` attend to themselves: causally in ``count`` equal runs, or by mask.

    ``mask`` ``[end - start, end - start]`` is 0 where a query sees a key and -inf elsewhere.
    """

    start: int
    end: int
    count: int
    mask: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Dense:
    """All queries ``[first, last)`` attend to all keys ``[start, end)``."""

    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The visibility of a portion, as intervals and as pieces that cover each visible pair once."""

    first: NDArray[np.int64]  # [K]
    last: NDArray[np.int64]  # [K]
    queries: int
    local: Sequence[Local]
    dense: Sequence[Dense]


def lay_out(spans: Sequence[Span], externals: Sequence[External]) -> Layout:
    """The layout of contiguous spans, depth first, and of the ancestors' keys behind them."""
    queries = spans[-1].end
    keys = max([queries, *(e.end for e in externals)])
    first, last = np.arange(keys), np.zeros(keys, dtype=np.int64)
    for span in spans:
        last[span.start : span.end] = span.last
    for external in externals:
        first[external.start : external.end] = external.first
        last[external.start : external.end] = external.last
    local, dense = [], [Dense(e.first, e.last, e.start, e.end) for e in externals]
    for block in _blocks(_runs(spans)):
        start, end = block[0][0].start, block[-1][-1].end
        single = len(block) == 1  # one segment, or leaves of equal length
        mask = None if single else _mask(last[start:end] - start)
        local.append(Local(start, end, len(block[0]) if single else 1, mask))
        members = [span for run in block for span in run]
        dense += [Dense(end, s.last, s.start, s.end) for s in members if s.last > end]
    return Layout(first=first, last=last, queries=queries, local=local, dense=dense)


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Leaves of equal length side by side make a run; any other segment is one by itself."""
    run: list[Span] = []
    for span in spans:
        alike = run and run[0].leaf and span.leaf
        if alike and span.end - span.start == run[0].end - run[0].start:
            run.append(span)
            continue
        if run:
            yield run
        run = [span]
    if run:
        yield run


def _blocks(runs: Iterator[list[Span]]) -> Iterator[list[list[Span]]]:
    block: list[list[Span]] = []
    for run in runs:
        if block and run[-1].end - block[0][0].start > _BLOCK:
            yield block
            block = []
        block.append(run)
    if block:
        yield block


def _mask(last: NDArray[np.int64]) -> NDArray[np.float32]:
    index = np.arange(len(last))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < last[None, :])
    return np.where(seen, 0.0, -np.inf).astype(np.float32)
