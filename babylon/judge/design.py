"""Which trajectories are judged together, and in which order.

Everything follows from a seed, so that a run repeated asks the same prompts. In the first pass
blocks form a ring, each sharing one trajectory with the next: the anchor that puts both on one
scale, and closing the ring shows how well that works. The first block is asked once more in
reversed order, because nothing else tells how reliable the judge is. Later passes take what is
unstable, in new company; who was listed early before is listed late now.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from random import Random
from statistics import fmean

from babylon.judge.sheet import Block


def ring(items: int, size: int, random: Random) -> list[Block]:
    """Blocks of at most ``size`` around a ring of all items; one block where they fit into it."""
    order = random.sample(range(items), items)
    if size == 1:
        return [(item,) for item in order]
    if items <= size:
        return [tuple(order)]
    count = ceil(items / (size - 1))
    cuts = [round(block * items / count) for block in range(count + 1)]
    blocks = [[order[i % items] for i in range(start, end + 1)] for start, end in pairwise(cuts)]
    return [tuple(random.sample(block, len(block))) for block in blocks]


def again(
    items: Sequence[int], size: int, places: Mapping[int, Sequence[float]], random: Random
) -> list[Block]:
    """Two or more items in mixed blocks; those listed late so far come first."""
    mixed = random.sample(list(items), len(items))
    count = ceil(len(mixed) / size)
    cuts = [round(block * len(mixed) / count) for block in range(count + 1)]
    return [
        tuple(sorted(mixed[start:end], key=lambda item: -fmean(places[item])))
        for start, end in pairwise(cuts)
    ]


def uncompared(
    order: Sequence[int], compared: set[tuple[int, int]], items: set[int]
) -> list[Block]:
    """Pairs of neighbours in the order, of which one is among ``items``, not yet compared: never,
    else in one listing only. ``compared`` holds (first, second) as listed."""
    neighbours = [pair for pair in pairwise(order) if items.intersection(pair)]
    never = [p for p in neighbours if p not in compared and p[::-1] not in compared]
    if never:
        return [pair if number % 2 else pair[::-1] for number, pair in enumerate(never)]
    return [
        pair if pair not in compared else pair[::-1]
        for pair in neighbours
        if pair not in compared or pair[::-1] not in compared
    ]
