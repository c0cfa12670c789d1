"""Visibility of tokens when a part of a prefix tree is laid out as one sequence.

Segments are in depth-first order, so the descendants of a token are one interval: query ``i`` sees
key ``j`` if and only if ``first[j] <= i < last[j]``. Keys are the portion's own tokens, followed by
those of ancestors that an earlier portion forwarded. There are Q queries and K >= Q keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128  # tokens: smaller groups of segments are faster as one masked piece
_CAUSAL = 384  # tokens: longer segments are faster as two causal halves and a dense rest


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """A segment with the tokens ``[start, end)``, or ``[start, last)`` with its descendants."""

    start: int
    end: int
    last: int

    @property
    def leaf(self) -> bool:
        """True if the segment has no descendants."""
        return self.end == self.last


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """Queries ``[first, last)`` attend to keys ``[start, end)``, in ``count`` equal runs of both.

    Attention is causal, or follows ``mask`` (queries of a run, keys of a run): 0 visible, -inf not.
    """

    first: int
    last: int
    start: int
    end: int
    count: int = 1
    mask: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class DensePiece:
    """All queries ``[first, last)`` attend to all keys ``[start, end)``."""

    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Visibility in a portion, as intervals and as pieces that cover every visible pair once."""

    first: NDArray[np.int64]  # [K]
    last: NDArray[np.int64]  # [K]
    queries: int
    local: Sequence[LocalPiece]
    dense: Sequence[DensePiece]

    def select(self, rows: NDArray[np.int64]) -> "Layout":
        """The layout of some of the queries (``rows``, ascending) and all keys."""
        dense = []
        for piece in self.dense:
            first, last = np.searchsorted(rows, [piece.first, piece.last]).tolist()
            if first < last:
                dense.append(replace(piece, first=first, last=last))
        return Layout(
            first=np.searchsorted(rows, self.first),
            last=np.searchsorted(rows, self.last),
            queries=len(rows),
            local=[part for piece in self.local for part in _select(piece, rows)],
            dense=dense,
        )


def lay_out(spans: Sequence[AttentionSpan], externals: Sequence[DensePiece]) -> Layout:
    """The layout of contiguous depth-first spans, followed by the ancestors' keys."""
    queries = spans[-1].end
    keys = max([queries, *(e.end for e in externals)])
    first, last = np.arange(keys), np.zeros(keys, dtype=np.int64)
    for span in spans:
        last[span.start : span.end] = span.last
    for external in externals:
        first[external.start : external.end] = external.first
        last[external.start : external.end] = external.last
    local: list[LocalPiece] = []
    dense = list(externals)
    for block in _blocks(_runs(spans)):
        members = [span for run in block for span in run]
        start, end = members[0].start, members[-1].end
        if len(block) > 1:
            local.append(LocalPiece(start, end, start, end, mask=_mask(last[start:end] - start)))
        elif members[0].end - members[0].start <= _CAUSAL:
            local.append(LocalPiece(start, end, start, end, count=len(members)))
        else:
            for span in members:
                _halve(span.start, span.end, local, dense)
        dense += [DensePiece(end, s.last, s.start, s.end) for s in members if s.last > end]
    return Layout(first=first, last=last, queries=queries, local=local, dense=dense)


def _halve(start: int, end: int, local: list[LocalPiece], dense: list[DensePiece]) -> None:
    if end - start <= _CAUSAL:
        local.append(LocalPiece(start, end, start, end))
        return
    middle = (start + end) // 2
    _halve(start, middle, local, dense)
    _halve(middle, end, local, dense)
    dense.append(DensePiece(middle, end, start, middle))


def _select(piece: LocalPiece, rows: NDArray[np.int64]) -> Iterator[LocalPiece]:
    length = (piece.end - piece.start) // piece.count
    starts = piece.first + length * np.arange(piece.count + 1)
    edges = np.searchsorted(rows, starts).tolist()
    inside = [rows[a:b] - at for a, b, at in zip(edges, edges[1:], starts, strict=False)]
    if all(np.array_equal(inside[0], run) for run in inside):
        if len(inside[0]):
            mask = _rows_mask(piece.mask, inside[0], length)
            yield replace(piece, first=edges[0], last=edges[-1], mask=mask)
        return
    for number, run in enumerate(inside):
        if len(run):
            start = piece.start + number * length
            mask = _rows_mask(piece.mask, run, length)
            yield LocalPiece(edges[number], edges[number + 1], start, start + length, mask=mask)


def _rows_mask(
    mask: NDArray[np.float32] | None, rows: NDArray[np.int64], length: int
) -> NDArray[np.float32] | None:
    if mask is not None:
        return mask[rows]
    if len(rows) == length:
        return None
    return np.where(np.arange(length) <= rows[:, None], 0.0, -np.inf).astype(np.float32)


def _runs(spans: Sequence[AttentionSpan]) -> Iterator[list[AttentionSpan]]:
    """Runs of adjacent leaves of equal length. Any other segment is a run of its own."""
    run: list[AttentionSpan] = []
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


def _blocks(runs: Iterator[list[AttentionSpan]]) -> Iterator[list[list[AttentionSpan]]]:
    block: list[list[AttentionSpan]] = []
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
