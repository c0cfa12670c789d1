"""The window compiler: calls as one exact-token prefix tree, so that shared text is forwarded once.

A token belongs to the tree when it is an input of the model: all tokens of a call but its last,
which is only ever a target. Sorting the calls puts calls with a common prefix side by side; the
lengths of the prefixes that neighbours share are all that is needed to build the tree, and that
of any part of the window (Kasai et al. 2001, doi 10.1007/3-540-48194-X_17: intervals of an LCP
array are the nodes of the compressed trie). A call that is a prefix of another makes no node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from babylon.training.grpo.sharing import Sharing, find_sharing
from babylon.training.grpo.training_input import CallTokens

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Tokens that the same calls have in common, and no other call has after the same prefix."""

    parent: int  # in PrefixTree.nodes, -1 for none
    start: int  # position of the first token in every call that has it
    tokens: NDArray[np.int64]  # [n], n > 0
    last: int  # nodes parent + 1 to last - 1 of its list are its descendants

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Calls, and how they share prefixes. Made by :func:`compile_tree`.

    ``order`` ``[C]`` are the calls sorted by their tokens; ``common`` ``[C]`` is how many input
    tokens each shares with the one before it in that order.
    """

    calls: Sequence[CallTokens]
    ids: Sequence[NDArray[np.int64]]  # per call: prompt and completion
    order: NDArray[np.int64]
    common: NDArray[np.int64]
    decode: Decode | None = None

    def only(self, calls: Sequence[int]) -> "PrefixTree":
        """The tree of a train step: these calls, in this order; no token is compared anew."""
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
            decode=self.decode,
        )

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """Depth first: a node comes before its descendants, which are contiguous."""
        return self._structure[0]

    @cached_property
    def node_of_call(self) -> Sequence[int]:
        """Per call: the node that holds its last input token."""
        return self._structure[1]

    @property
    def unique_tokens(self) -> int:
        """How many tokens are forwarded."""
        return sum(len(node.tokens) for node in self.nodes)

    @cached_property
    def sharing(self) -> Sharing:
        """What the order of the prompts shares, and what it loses."""
        return find_sharing(self.calls, self.nodes, self.node_of_call, self.decode)

    @cached_property
    def _structure(self) -> tuple[Sequence[Node], Sequence[int]]:
        return _build(self.ids, self.order, self.common)


def compile_tree(calls: Sequence[CallTokens], *, decode: Decode | None = None) -> PrefixTree:
    """Compile a window once; every iteration, train step and frozen policy uses the result.

    ``decode`` turns token ids into text, so that ``sharing.advice`` can quote it.
    """
    if not calls:
        raise ValueError("no calls to compile: a window needs at least one")
    ids = [np.array([*call.prompt, *call.completion], dtype=np.int64) for call in calls]
    keys = [tokens[:-1].astype(">u4").tobytes() for tokens in ids]  # compare like the tokens do
    order = np.array(sorted(range(len(calls)), key=keys.__getitem__), dtype=np.int64)
    common = np.zeros(len(calls), dtype=np.int64)
    for i in range(1, len(calls)):
        common[i] = _common_prefix(ids[order[i - 1]][:-1], ids[order[i]][:-1])
    return PrefixTree(calls=calls, ids=ids, order=order, common=common, decode=decode)


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


@dataclass(slots=True)
class _Open:
    """A node under construction; its start is known once its parent is."""

    end: int
    call: int  # one that has these tokens
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
            top.end, top.call = length, call  # the call before is a prefix of this one
        elif length > shared:
            path.append(_Open(length, call, []))
        deepest[call] = path[-1]
    _close(path, 0)
    nodes = _number(root, ids)
    return nodes, [_holder(nodes, deepest[c].index, len(ids[c]) - 2) for c in range(len(ids))]


def _close(path: list[_Open], depth: int) -> None:
    """Leave the nodes below ``depth``; a node that reaches across it is split there."""
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
    """Children so that popping yields leaves first, equal lengths together."""
    return sorted(node.children, key=lambda c: (bool(c.children), c.end - c.start), reverse=True)


def _holder(nodes: Sequence[Node], index: int, position: int) -> int:
    while nodes[index].start > position:
        index = nodes[index].parent
    return index
