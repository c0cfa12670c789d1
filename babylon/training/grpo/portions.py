"""Cut a prefix tree into portions of bounded size. Each is forwarded as one packed sequence.

Segments whose subtree exceeds the bound form the upper portions. The subtrees below them are packed
side by side into lower portions, which see the upper ones through their keys and values. A portion
with children runs twice: before its children for its keys and values, and after them for its
gradient. Thus only one portion's activations are in memory at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from babylon.training.grpo.attention.layout import AttentionSpan, DensePiece, Layout, lay_out
from babylon.training.grpo.prefix_tree import PrefixTree

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ancestors:
    """Tokens of another portion, as positions in it."""

    portion: int
    tokens: Ints  # ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The M loss terms of a portion: the token at ``row`` predicts ``target``.

    The target is a completion token of ``call``, at ``place`` in the table of the tree's completion
    tokens. ``final`` is true if the call's last term is in this portion. All ``[M]``.
    """

    row: Ints
    target: Ints
    call: Ints
    place: Ints
    final: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """N tokens of a tree in depth-first order. In ``layout`` their ancestors' keys follow them."""

    tokens: Ints  # [N]
    positions: Ints  # [N]
    calls: Ints  # [N], number of calls that share the token
    layout: Layout
    ancestors: Sequence[Ancestors]
    children: Sequence[int]  # indices of portions
    terms: Terms


@dataclass(frozen=True, slots=True)
class _Segment:
    """A node of the tree, or a part of a node that is longer than a portion."""

    parent: int
    start: int
    tokens: Ints
    calls: Ints


def cut(tree: PrefixTree, max_tokens: int) -> tuple[list[Portion], list[int]]:
    """Portions of at most ``max_tokens`` tokens that make the tree, and indices of the roots."""
    segments, of_node = _segments(tree, max_tokens)
    portion_of: dict[int, int] = {}
    parents: list[int] = []
    _assign(list(range(len(segments))), segments, max_tokens, portion_of, parents)
    members: list[list[int]] = [[] for _ in parents]
    for index in range(len(segments)):
        members[portion_of[index]].append(index)
    offsets: dict[int, int] = {}
    for own in members:
        at = 0
        for index in own:
            offsets[index] = at
            at += len(segments[index].tokens)
    terms = _terms(tree, segments, of_node, portion_of, offsets, len(members))
    children: list[list[int]] = [[] for _ in range(len(members) + 1)]
    for number, parent in enumerate(parents):
        children[parent].append(number)  # the last list, of parent -1, holds the roots
    portions = [
        _portion(own, segments, portion_of, offsets, children[number], terms[number])
        for number, own in enumerate(members)
    ]
    return portions, children[-1]


def _segments(tree: PrefixTree, max_tokens: int) -> tuple[list[_Segment], list[list[int]]]:
    segments: list[_Segment] = []
    of_node: list[list[int]] = []
    for node, calls in zip(tree.nodes, tree.calls_of_tokens, strict=True):
        parent = of_node[node.parent][-1] if node.parent >= 0 else -1
        of_node.append([])
        for at in range(0, len(node.tokens), max_tokens):
            tokens = node.tokens[at : at + max_tokens]
            of_node[-1].append(len(segments))
            shared = calls[at : at + max_tokens]
            segments.append(_Segment(parent, node.start + at, tokens, shared))
            parent = len(segments) - 1
    return segments, of_node


def _assign(
    chosen: Sequence[int],
    segments: Sequence[_Segment],
    max_tokens: int,
    portion_of: dict[int, int],
    parents: list[int],
) -> None:
    """Assign a portion to every chosen segment. ``chosen`` is depth first and holds all parents."""
    levels: list[dict[int, int]] = []  # segments below those that follow → their subtrees' tokens
    while chosen:
        size = {index: len(segments[index].tokens) for index in chosen}
        for index in reversed(chosen):
            if segments[index].parent >= 0:
                size[segments[index].parent] += size[index]
        levels.append({index: tokens for index, tokens in size.items() if tokens <= max_tokens})
        chosen = [index for index in chosen if size[index] > max_tokens]
    for light in reversed(levels):
        filled: dict[int, tuple[int, int]] = {}  # parent portion → newest child, the child's tokens
        for index, subtree in light.items():
            parent = segments[index].parent
            if parent in light:
                portion_of[index] = portion_of[parent]
                continue
            above = portion_of[parent] if parent >= 0 else -1
            portion, tokens = filled.get(above, (-1, max_tokens))
            if tokens + subtree > max_tokens:
                portion, tokens = len(parents), 0
                parents.append(above)
            portion_of[index] = portion
            filled[above] = portion, tokens + subtree


def _portion(
    own: Sequence[int],
    segments: Sequence[_Segment],
    portion_of: dict[int, int],
    start: dict[int, int],
    children: Sequence[int],
    terms: Terms,
) -> Portion:
    end = {index: start[index] + len(segments[index].tokens) for index in own}
    last = dict(end)
    reach: dict[int, tuple[int, int]] = {}  # ancestor in another portion → its descendants here
    for index in reversed(own):
        ancestor = segments[index].parent
        if ancestor in last:
            last[ancestor] = max(last[ancestor], last[index])
            continue
        while ancestor >= 0:
            _, until = reach.get(ancestor, (0, last[index]))
            reach[ancestor] = start[index], until
            ancestor = segments[ancestor].parent
    keys = max(end.values())
    positions = [np.arange(len(segments[i].tokens)) + segments[i].start for i in own]
    runs: dict[int, list[Ints]] = {}  # portion → its tokens
    seen: dict[tuple[int, int], list[Ints]] = {}  # queries → the keys that they see
    # portions above have lower numbers, so the keys of one interval ascend along its ancestors
    for ancestor in sorted(reach, key=lambda a: (portion_of[a], a)):
        run = np.arange(len(segments[ancestor].tokens))
        runs.setdefault(portion_of[ancestor], []).append(start[ancestor] + run)
        seen.setdefault(reach[ancestor], []).append(keys + run)
        positions.append(segments[ancestor].start + run)
        keys += len(run)
    externals = [DensePiece(*queries, np.concatenate(of)) for queries, of in seen.items()]
    spans = [AttentionSpan(start[i], end[i], last[i]) for i in own]
    return Portion(
        tokens=np.concatenate([segments[i].tokens for i in own]),
        positions=np.concatenate(positions[: len(own)]),
        calls=np.concatenate([segments[i].calls for i in own]),
        layout=lay_out(spans, externals, np.concatenate(positions)),
        ancestors=[Ancestors(portion, np.concatenate(of)) for portion, of in runs.items()],
        children=children,
        terms=terms,
    )


def _terms(
    tree: PrefixTree,
    segments: Sequence[_Segment],
    of_node: Sequence[Sequence[int]],
    portion_of: dict[int, int],
    offsets: dict[int, int],
    portions: int,
) -> list[Terms]:
    found: list[list[Ints]] = [[] for _ in range(portions)]
    for call, tokens in enumerate(tree.ids):
        first = len(tree.calls[call].prompt) - 1  # the last prompt token predicts step 0
        home = -1
        for index, start, end in _path(tree, call, segments, of_node, first, len(tokens) - 1):
            home = portion_of[index] if home < 0 else home
            places = np.arange(start, end)
            row = places - segments[index].start + offsets[index]
            same = np.full((2, end - start), [[call], [home == portion_of[index]]])
            table = tree.offsets[call] + places - first
            term = np.stack([row, tokens[places + 1], same[0], table, same[1]])
            found[portion_of[index]].append(term)
    joined = [np.concatenate([*f, np.zeros((5, 0), dtype=np.int64)], axis=1) for f in found]
    return [
        Terms(row=t[0], target=t[1], call=t[2], place=t[3], final=t[4].astype(bool)) for t in joined
    ]


def _path(
    tree: PrefixTree,
    call: int,
    segments: Sequence[_Segment],
    of_node: Sequence[Sequence[int]],
    first: int,
    stop: int,
) -> Iterator[tuple[int, int, int]]:
    """(segment, start, stop) of a call's positions ``[first, stop)``, last segment first."""
    index = of_node[tree.node_of_call[call]][-1]
    while index >= 0 and stop > first:
        start = max(segments[index].start, first)
        if start < stop:
            yield index, start, stop
            stop = start
        index = segments[index].parent
