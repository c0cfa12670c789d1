"""The processes of one update. Each computes a part of every tree, and all of them add up.

All ranks hold the same window, weights and record. Passes over a tree are divided, sums over its
tokens and gradients are exchanged, and every decision is made from what was exchanged. The ranks
therefore take the same steps without a leader. A rank alone exchanges nothing.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from babylon.training.grpo.forward import FittingForward, PolicyForward
from babylon.training.grpo.prefix_tree import PrefixTree
from babylon.training.grpo.tree_forward import flat_places


class Ranks(Protocol):
    """This process among ``size`` equal ones. Every method is called by all of them together."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def add(self, values: Tensor) -> None:
        """Replace ``values`` on every rank by their sum over all ranks, equal bit for bit."""

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each ``.grad`` by its sum over all ranks. None counts as zeros."""

    def most(self, count: int) -> int:
        """The largest ``count`` of all ranks."""


class Alone:
    """The only process of an update."""

    rank, size = 0, 1

    def add(self, values: Tensor) -> None:
        """Leave the values as they are."""

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Leave the gradients as they are."""

    def most(self, count: int) -> int:
        """Return ``count``."""
        return count


ALONE = Alone()


def shares(tree: PrefixTree, size: int) -> list[list[int]]:
    """Cut a tree's calls into ``size`` lists of nearly equal cost. Lists can be empty.

    In sorted order, subtrees are runs of calls, and a cut costs only the prefix that its
    neighbours share, which both sides then forward. Among all cuts into runs, these have the
    lowest cost of the dearest run. The cost of a run is its forwarded tokens, and its completion
    tokens again for the head.
    """
    order, common = tree.order.tolist(), tree.common.tolist()
    whole = [len(tree.ids[call]) - 1 + len(tree.calls[call].completion) for call in order]

    def cuts(bound: int) -> list[int]:
        places, cost = [0], 0
        for place, (alone, shared) in enumerate(zip(whole, common, strict=True)):
            cost += alone - shared
            if cost > bound and place > places[-1]:
                places.append(place)
                cost = alone
        return [*places, len(order)]

    low, high = max(whole), sum(whole)  # a bound below the first cuts runs of one call, too dear
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cuts(middle)) - 1 <= size else (middle + 1, high)
    runs = [sorted(order[first:last]) for first, last in pairwise(cuts(low))]
    return runs + [[] for _ in range(size - len(runs))]


def own_share(tree: PrefixTree, ranks: Ranks) -> list[int]:
    """The calls of a tree that this rank computes."""
    return shares(tree, ranks.size)[ranks.rank] if ranks.size > 1 else list(range(len(tree.calls)))


def logprobs_of_tree(fitting: FittingForward, tree: PrefixTree, ranks: Ranks) -> Tensor:
    """Logprobs ``[N]`` of a tree's completion tokens, without gradient, on every rank.

    Raises:
        OutOfMemoryError: the smallest portion does not fit.
    """
    if ranks.size == 1:
        return fitting.run(lambda forward: forward.logprobs(tree).logprobs)
    own = own_share(tree, ranks)
    weight = next(fitting.forward.model.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    table = torch.zeros(int(tree.offsets[-1]), dtype=dtype, device=weight.device)
    part = tree.only(own) if own else None

    def values(forward: PolicyForward) -> Tensor | None:
        return forward.logprobs(part).logprobs if part else None

    if (found := fitting.run(values)) is not None:
        table[torch.from_numpy(flat_places(tree.offsets, own)).to(weight.device)] = found
    ranks.add(table)
    return table
