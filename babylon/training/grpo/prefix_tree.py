"""Calls as one prefix tree of exact tokens, so that shared text is forwarded once.

The tree holds the inputs of the model: all tokens of a call but the last, which is only a target.
Sorting the calls puts calls with a common prefix side by side. The lengths of the prefixes that
neighbours share determine the tree, and the tree of every subset of the calls (Kasai et al. 2001,
doi 10.1007/3-540-48194-X_17: intervals of an LCP array are the nodes of the compressed trie). A
call that is a prefix of another call has no node of its own.

Prompts share only the text before their first difference. Equal text after it is forwarded once for
each branch of the tree: sharing is lost because private text comes before common text. Lost sharing
is found as runs of at least 32 equal tokens, by hashes of all runs of that length (shingles: Broder
1997, doi 10.1109/SEQUEN.1997.666900), computed in five doublings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from babylon.training.grpo.training_input import CallTokens

_DOUBLINGS = 5
_RUN = 2**_DOUBLINGS
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: odd, mixes well
_WORTH_SAYING = 0.02  # share of the unique tokens: less is boilerplate that must repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A run of tokens that the same calls share."""

    parent: int  # in PrefixTree.nodes, -1 for none
    start: int  # position of the first token in these calls
    tokens: NDArray[np.int64]  # [n], n > 0
    last: int  # the descendants are the nodes after this one, up to last - 1

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Calls and the prefixes that they share. Made by :func:`compile_tree`.

    ``order`` ``[C]`` sorts the calls by their tokens. ``common`` ``[C]`` is the number of input
    tokens that each call shares with the call before it in that order.
    """

    calls: Sequence[CallTokens]
    ids: Sequence[NDArray[np.int64]]  # per call: prompt and completion
    order: NDArray[np.int64]
    common: NDArray[np.int64]

    def only(self, calls: Sequence[int]) -> "PrefixTree":
        """The tree of some of the calls, in this order. No tokens are compared again."""
        chosen = np.asarray(calls, dtype=np.int64)
        if len(set(calls)) != len(calls):
            raise ValueError(f"a call is named twice in {list(calls)}: name each once")
        rank = np.empty(len(self.order), dtype=np.int64)
        rank[self.order] = np.arange(len(self.order))
        order = np.argsort(rank[chosen])
        ranks = rank[chosen][order]
        common = np.zeros(len(chosen), dtype=np.int64)
        for i in range(1, len(chosen)):
            common[i] = self.common[ranks[i - 1] + 1 : ranks[i] + 1].min()
        return PrefixTree(
            calls=[self.calls[i] for i in calls],
            ids=[self.ids[i] for i in calls],
            order=order,
            common=common,
        )

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """The nodes in depth-first order: a node's descendants follow it without a gap."""
        return self._structure[0]

    @cached_property
    def node_of_call(self) -> Sequence[int]:
        """The node that holds each call's last input token, ``[C]``."""
        return self._structure[1]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """``[C + 1]``: where each call's completion begins in a table of all completion tokens."""
        return np.cumsum([0, *(len(call.completion) for call in self.calls)])

    @property
    def unique_tokens(self) -> int:
        """Number of forwarded tokens."""
        return sum(len(node.tokens) for node in self.nodes)

    @cached_property
    def calls_of_tokens(self) -> Sequence[NDArray[np.int64]]:
        """Number of calls that share each token of each node. A call may end inside a node."""
        ended = [np.zeros(len(node.tokens), dtype=np.int64) for node in self.nodes]
        for call, node in enumerate(self.node_of_call):
            ended[node][len(self.ids[call]) - 2 - self.nodes[node].start] += 1
        below = np.zeros(len(self.nodes) + 1, dtype=np.int64)  # the last place is of no parent
        counts = list(ended)
        for index in range(len(counts) - 1, -1, -1):
            counts[index] = ended[index][::-1].cumsum()[::-1] + below[index]
            below[self.nodes[index].parent] += counts[index][0]
        return counts

    @cached_property
    def _structure(self) -> tuple[Sequence[Node], Sequence[int]]:
        return _build(self.ids, self.order, self.common)


def compile_tree(calls: Sequence[CallTokens]) -> PrefixTree:
    """Build the tree of a window, once for all iterations, train steps and frozen policies."""
    if not calls:
        raise ValueError("no calls to compile: a window needs at least one")
    ids = [np.array([*call.prompt, *call.completion], dtype=np.int64) for call in calls]
    keys = [tokens[:-1].astype(">u4").tobytes() for tokens in ids]  # compares like the tokens
    order = np.array(sorted(range(len(calls)), key=keys.__getitem__), dtype=np.int64)
    common = np.zeros(len(calls), dtype=np.int64)
    for i in range(1, len(calls)):
        common[i] = _common_prefix(ids[order[i - 1]][:-1], ids[order[i]][:-1])
    return PrefixTree(calls=calls, ids=ids, order=order, common=common)


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


@dataclass(slots=True)
class _Open:
    """A node under construction. Its start is set together with its parent."""

    end: int
    call: int  # a call with these tokens
    children: list["_Open"]
    start: int = 0
    index: int = -1


def _build(
    ids: Sequence[NDArray[np.int64]], order: NDArray[np.int64], common: NDArray[np.int64]
) -> tuple[list[Node], list[int]]:
    root = _Open(0, -1, [])
    path, deepest = [root], {}
    for call, shared in zip(order.tolist(), common.tolist(), strict=True):
        _close(path, shared)
        length = len(ids[call]) - 1
        top = path[-1]
        if top is not root and not top.children and top.end == shared:
            top.end, top.call = length, call  # the previous call is a prefix of this one
        elif length > shared:
            path.append(_Open(length, call, []))
        deepest[call] = path[-1]
    _close(path, 0)
    nodes = _number(root, ids)
    return nodes, [_holder(nodes, deepest[c].index, len(ids[c]) - 2) for c in range(len(ids))]


def _close(path: list[_Open], depth: int) -> None:
    """Close the open nodes below ``depth``. A node that crosses ``depth`` is split there."""
    while path[-1].end > depth:
        node = path.pop()
        if path[-1].end < depth:
            path.append(_Open(depth, node.call, []))
        node.start = path[-1].end
        path[-1].children.append(node)


def _number(root: _Open, ids: Sequence[NDArray[np.int64]]) -> list[Node]:
    nodes: list[Node] = []
    parents: list[int] = []
    open_nodes: list[_Open] = []
    stack = [(child, -1) for child in _by_length(root)]
    while stack:
        node, parent = stack.pop()
        node.index = len(open_nodes)
        open_nodes.append(node)
        parents.append(parent)
        stack += [(child, node.index) for child in _by_length(node)]
    last = list(range(1, len(open_nodes) + 1))
    for index in range(len(open_nodes) - 1, -1, -1):
        if parents[index] >= 0:
            last[parents[index]] = max(last[parents[index]], last[index])
    for node, parent, end in zip(open_nodes, parents, last, strict=True):
        tokens = ids[node.call][node.start : node.end]
        nodes.append(Node(parent=parent, start=node.start, tokens=tokens, last=end))
    return nodes


def _by_length(node: _Open) -> list[_Open]:
    """Children in the order that makes popping yield leaves first, equal lengths together."""
    return sorted(node.children, key=lambda c: (bool(c.children), c.end - c.start), reverse=True)


def _holder(nodes: Sequence[Node], index: int, position: int) -> int:
    while nodes[index].start > position:
        index = nodes[index].parent
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Token counts of a tree. A call's last token is only a target and not counted."""

    flat_tokens: int  # forwarded by a trainer without a tree, not counting padding
    unique_tokens: int  # forwarded by the tree
    lost_tokens: int  # unique tokens that are copies, and shared if common text came first
    advice: str | None  # on the order of prompts; None if few tokens are lost


def find_sharing(tree: PrefixTree) -> Sharing:
    """Count shared and lost tokens. The advice gives positions and counts, and quotes no prompt."""
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
            _advice(nodes, prompts, lost, flat) if lost.sum() > _WORTH_SAYING * unique else None
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
) -> str:
    ends = np.cumsum([len(part) for part in parts])
    copies = [lost[end - len(part) : end] for part, end in zip(parts, ends.tolist(), strict=True)]
    by_start: dict[int, int] = {}
    for node, copied in zip(nodes, copies, strict=True):
        by_start[node.start] = by_start.get(node.start, 0) + int(copied.sum())
    start = max(by_start, key=by_start.__getitem__)
    here = [i for i, node in enumerate(nodes) if node.start == start and copies[i].any()]
    length = int(np.median([int(copies[i].argmax()) for i in here]))
    unique = sum(len(node.tokens) for node in nodes)
    parting = f"a segment of {length} tokens differs between calls" if length else "calls part"
    return (
        f"{int(lost.sum())} of {unique} unique tokens repeat text of other calls: from token"
        f" {start} {parting}, and {len(here)} branches have text after it that others have too."
        f" With shared text first, {flat} tokens would shrink"
        f" {flat / (unique - int(lost.sum())):.1f} times, now {flat / unique:.1f} times"
    )
