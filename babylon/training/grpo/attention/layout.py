"""Visibility of tokens when a part of a prefix tree is laid out as one sequence.

Segments are in depth-first order, so the descendants of a token are one interval: query ``i`` sees
key ``j`` if and only if ``first[j] <= i < last[j]``. Keys are the portion's own tokens, followed by
those of ancestors that an earlier portion forwarded. There are Q queries and K >= Q keys.

In a layer with a sliding window of W tokens, query ``i`` sees key ``j`` only if its position in the
call is less than W after the key's. :func:`windowed` derives that layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.float32]  # [queries, keys]: 0 visible, -inf not
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

    Attention is causal, or follows ``mask`` (queries of a run, keys of a run).
    """

    first: int
    last: int
    start: int
    end: int
    count: int = 1
    mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class DensePiece:
    """All queries ``[first, last)`` attend to all ``keys``, or follow ``mask``.

    With a mask, every query sees some key.
    """

    first: int
    last: int
    keys: Ints  # ascending
    mask: Mask | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Visibility in a portion, as intervals and as pieces that cover every visible pair once."""

    first: Ints  # [K]
    last: Ints  # [K]
    positions: Ints  # [K], of the keys in their calls
    rows: Ints  # [Q], the queries' own keys
    window: int | None = None
    local: Sequence[LocalPiece]
    dense: Sequence[DensePiece]

    @property
    def queries(self) -> int:
        return len(self.rows)

    def select(self, rows: Ints) -> "Layout":
        """The layout of some of the queries (``rows``, ascending) and all keys."""
        dense = []
        for piece in self.dense:
            first, last = np.searchsorted(rows, [piece.first, piece.last]).tolist()
            if first < last:
                chosen = rows[first:last] - piece.first
                mask = None if piece.mask is None else piece.mask[chosen]
                dense.append(DensePiece(first, last, piece.keys, mask))
        return Layout(
            first=np.searchsorted(rows, self.first),
            last=np.searchsorted(rows, self.last),
            positions=self.positions,
            rows=self.rows[rows],
            window=self.window,
            local=[part for piece in self.local for part in _select(piece, rows)],
            dense=dense,
        )


def lay_out(
    spans: Sequence[AttentionSpan], externals: Sequence[DensePiece], positions: Ints
) -> Layout:
    """The layout of contiguous depth-first spans, followed by the ancestors' keys.

    ``positions`` ``[K]`` are those of all keys in their calls.
    """
    queries = spans[-1].end
    first, last = np.arange(len(positions)), np.zeros(len(positions), dtype=np.int64)
    for span in spans:
        last[span.start : span.end] = span.last
    for external in externals:
        first[external.keys], last[external.keys] = external.first, external.last
    local: list[LocalPiece] = []
    dense: list[DensePiece] = []
    below: list[DensePiece] = []  # spans' keys, seen by the descendants beyond their block
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
        below += [
            DensePiece(end, s.last, np.arange(s.start, s.end)) for s in members if s.last > end
        ]
    for pieces in (externals, below):
        dense += [p for p in pieces if len(p.keys) > _BLOCK]
        narrow = sorted((p for p in pieces if len(p.keys) <= _BLOCK), key=lambda p: p.first)
        dense += _joined([list(group) for _, group in groupby(narrow, key=lambda p: p.first)])
    return Layout(
        first=first,
        last=last,
        positions=positions,
        rows=np.arange(queries),
        local=local,
        dense=dense,
    )


def _joined(starts: Sequence[Sequence[DensePiece]]) -> Iterator[DensePiece]:
    """Few dense pieces instead of one for each ancestor, which short turns of a deep call have.

    Merging costs the same for a piece of few keys as for one of many. Pieces are grouped by their
    first query. The right half of the groups sees the left half's keys in one piece for each
    distinct end. A query is thus in a number of pieces that grows with the logarithm of its depth.
    Pieces that contain the border belong to one path of the tree, so their keys ascend along it.
    """
    if len(starts) > 1:
        middle = len(starts) // 2
        border = starts[middle][0].first
        left = [[replace(p, last=min(p.last, border)) for p in group] for group in starts[:middle]]
        yield from _joined(left)
        yield from _joined(starts[middle:])
        across = [replace(p, first=border) for group in starts[:middle] for p in group]
    else:
        across = [p for group in starts for p in group]
    across = sorted((p for p in across if p.last > p.first), key=lambda p: p.last)  # stable
    for last, group in groupby(across, key=lambda p: p.last):
        members = list(group)
        yield DensePiece(members[0].first, last, np.concatenate([p.keys for p in members]))


@lru_cache(maxsize=8)  # a portion has two layouts, and each may have a window
def windowed(layout: Layout, window: int) -> Layout:
    """The layout of a layer in which a query sees keys less than ``window`` positions back."""
    queries, keys = layout.positions[layout.rows], layout.positions
    dense = [part for piece in layout.dense for part in _windowed(piece, queries, keys, window)]
    local = []
    for piece in layout.local:
        length = (piece.end - piece.start) // piece.count
        own = keys[piece.start : piece.start + length]
        if int(own.max() - own.min()) < window:
            local.append(piece)
            continue
        rows = queries[piece.first : piece.first + (piece.last - piece.first) // piece.count]
        mask = piece.mask
        if mask is None:
            mask = np.where(own <= rows[:, None], 0.0, -np.inf).astype(np.float32)
        far = rows[:, None] - own >= window
        local.append(replace(piece, mask=np.where(far, -np.inf, mask).astype(np.float32)))
    return replace(layout, window=window, local=local, dense=dense)


def _windowed(piece: DensePiece, queries: Ints, keys: Ints, window: int) -> Iterator[DensePiece]:
    """The parts of a dense piece within the window: dense where possible, else masked."""
    at, own = keys[piece.keys], queries[piece.first : piece.last]  # at ascends
    some, every = np.searchsorted(at, [own.min() - window, own.max() - window], side="right")
    if every - some > _BLOCK and len(own) > _BLOCK:
        middle = (piece.first + piece.last) // 2
        for first, last in ((piece.first, middle), (middle, piece.last)):
            yield from _windowed(DensePiece(first, last, piece.keys), queries, keys, window)
        return
    if every < len(at):
        yield DensePiece(piece.first, piece.last, piece.keys[every:])
    if some == every:
        return
    seen = own[:, None] - at[some:every] < window
    edges = np.flatnonzero(np.diff(seen.any(1), prepend=False, append=False))
    for first, last in edges.reshape(-1, 2).tolist():  # runs of queries that see some key
        mask = np.where(seen[first:last], 0.0, -np.inf).astype(np.float32)
        place = piece.first + first, piece.first + last
        yield DensePiece(*place, piece.keys[some:every], mask)


def _halve(start: int, end: int, local: list[LocalPiece], dense: list[DensePiece]) -> None:
    if end - start <= _CAUSAL:
        local.append(LocalPiece(start, end, start, end))
        return
    middle = (start + end) // 2
    _halve(start, middle, local, dense)
    _halve(middle, end, local, dense)
    dense.append(DensePiece(middle, end, np.arange(start, middle)))


def _select(piece: LocalPiece, rows: Ints) -> Iterator[LocalPiece]:
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


def _rows_mask(mask: Mask | None, rows: Ints, length: int) -> Mask | None:
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


def _mask(last: Ints) -> Mask:
    index = np.arange(len(last))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < last[None, :])
    return np.where(seen, 0.0, -np.inf).astype(np.float32)
