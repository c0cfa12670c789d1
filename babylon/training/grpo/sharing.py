"""Tokens that a window's prompts share, and tokens that another order of their text would share.

Prompts share only the text before their first difference. Equal text after it is forwarded once for
each branch of the tree: sharing is lost because private text comes before common text. Lost sharing
is found as runs of at least 32 equal tokens, by hashes of all runs of that length (shingles: Broder
1997, doi 10.1109/SEQUEN.1997.666900), computed in five doublings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from babylon.training.grpo.prefix_tree import Node, PrefixTree
from babylon.training.grpo.training_input import CallTokens

Decode = Callable[[Sequence[int]], str]
_DOUBLINGS = 5
_RUN = 2**_DOUBLINGS
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: odd, mixes well
_QUOTED_TOKENS = 24
_WORTH_SAYING = 0.02  # share of the unique tokens: less is boilerplate that must repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Token counts of a tree. A call's last token is only a target and not counted."""

    flat_tokens: int  # forwarded by a trainer without a tree, not counting padding
    unique_tokens: int  # forwarded by the tree
    lost_tokens: int  # unique tokens that are copies, and shared if common text came first
    advice: str | None  # on the order of prompts; None if few tokens are lost


def find_sharing(tree: PrefixTree, decode: Decode | None = None) -> Sharing:
    """Count shared and lost tokens. ``decode`` turns token ids into text that the advice quotes."""
    calls, nodes = tree.calls, tree.nodes
    flat = sum(len(c.prompt) + len(c.completion) - 1 for c in calls)
    unique = tree.unique_tokens
    prompts = _prompt_parts(calls, nodes, tree.node_of_call)
    lost = _copies(prompts)
    return Sharing(
        flat_tokens=flat,
        unique_tokens=unique,
        lost_tokens=int(lost.sum()),
        advice=(
            _advice(nodes, prompts, lost, flat, decode)
            if lost.sum() > _WORTH_SAYING * unique
            else None
        ),
    )


def _prompt_parts(
    calls: Sequence[CallTokens], nodes: Sequence[Node], node_of_call: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Each node's tokens that belong to a prompt. Completions cannot be reordered."""
    reach = np.zeros(len(nodes), dtype=np.int64)
    for call, node in zip(calls, node_of_call, strict=True):
        while node >= 0 and reach[node] < len(call.prompt):
            reach[node] = len(call.prompt)
            node = nodes[node].parent
    return [n.tokens[: max(0, int(r) - n.start)] for n, r in zip(nodes, reach, strict=True)]


def _copies(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Mask over the concatenated parts: tokens in a run that also stands in an earlier part."""
    tokens = np.concatenate(parts)
    part = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    windows = len(tokens) - _RUN + 1
    if windows <= 0:
        return np.zeros(len(tokens), dtype=bool)
    hashes, multiplier = tokens.astype(np.uint64), _MULTIPLIER
    for doubling in range(_DOUBLINGS):
        half = 2**doubling
        hashes = hashes[:-half] * np.uint64(multiplier) + hashes[half:]
        hashes ^= hashes >> np.uint64(29)
        multiplier = multiplier * multiplier % 2**64
    inside = np.flatnonzero(part[:windows] == part[_RUN - 1 :])
    _, first, index = np.unique(hashes[inside], return_index=True, return_inverse=True)
    again = inside[part[inside] != part[inside[first]][index]]
    covered = np.zeros(len(tokens) + 1, dtype=np.int64)
    covered[again] += 1
    np.add.at(covered, again + _RUN, -1)
    return covered.cumsum()[:-1] > 0


def _advice(
    nodes: Sequence[Node],
    parts: Sequence[NDArray[np.int64]],
    lost: NDArray[np.bool_],
    flat: int,
    decode: Decode | None,
) -> str:
    ends = np.cumsum([len(part) for part in parts])
    copies = [lost[end - len(part) : end] for part, end in zip(parts, ends.tolist(), strict=True)]
    by_start: dict[int, int] = {}
    for node, copied in zip(nodes, copies, strict=True):
        by_start[node.start] = by_start.get(node.start, 0) + int(copied.sum())
    start = max(by_start, key=by_start.__getitem__)
    here = [i for i, node in enumerate(nodes) if node.start == start and copies[i].any()]
    lengths = [int(copies[i].argmax()) for i in here]
    length = int(np.median(lengths))
    unique = sum(len(node.tokens) for node in nodes)
    segment = parts[here[0]][: min(lengths[0], _QUOTED_TOKENS)].tolist()
    quoted = f" ({decode(segment)!r} in one call)" if decode is not None and segment else ""
    parting = (
        f"a segment of {length} tokens{quoted} differs between calls" if length else "calls part"
    )
    return (
        f"{int(lost.sum())} of {unique} unique tokens repeat text of other calls: from token"
        f" {start} {parting}, and {len(here)} branches have text after it that others have too."
        f" With shared text first, {flat} tokens would shrink"
        f" {flat / (unique - int(lost.sum())):.1f} times, now {flat / unique:.1f} times"
    )
