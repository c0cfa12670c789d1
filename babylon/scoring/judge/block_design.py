"""Which trajectories are judged together, and in which order.

Everything follows from a seed, so that a run repeated asks the same prompts. In the first pass
blocks form a ring_blocks, each sharing one trajectory with the next: the anchor that puts both on one
scale, and closing the ring_blocks shows how well that works. The first block is asked once more in
reversed order, because nothing else tells how reliable the judge is. Later passes take what is
unstable, in new company; who was listed early before is listed late now. Of pairs those are asked
whose answer is least known, which under a bias for the first are not the neighbours.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise, permutations
from math import ceil
from random import Random
from statistics import fmean

from babylon.scoring.judge.calibrate import Floats
from babylon.scoring.judge.group_prompts import Block


def ring_blocks(items: int, size: int, random: Random) -> list[Block]:
    """Blocks of at most ``size`` around a ring_blocks of all items; one block where they fit into it."""
    order = random.sample(range(items), items)
    if size == 1:
        return [(item,) for item in order]
    if items <= size:
        return [tuple(order)]
    count = ceil(items / (size - 1))
    cuts = [round(block * items / count) for block in range(count + 1)]
    blocks = [[order[i % items] for i in range(start, end + 1)] for start, end in pairwise(cuts)]
    if size == 2:  # each is first once and second once, so no bias for a place favours anybody
        return [tuple(block) for block in blocks]
    return [tuple(random.sample(block, len(block))) for block in blocks]


def mixed_blocks(
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


def informative_pairs(
    order: Sequence[int], asked: Set[Block], unstable: Set[int], tells: Floats
) -> list[Block]:
    """Pairs not asked in that order yet, those first whose answers tell most, each item in one.

    ``tells[i, j]`` is for i listed first. Pairs without an ``unstable`` item have nothing left to
    tell, but for neighbours in the ``order`` that never met.
    """
    met = {frozenset(pair) for pair in asked}
    strangers = {frozenset(pair) for pair in pairwise(order)} - met
    pairs = [
        pair
        for pair in permutations(order, 2)
        if pair not in asked and (not unstable.isdisjoint(pair) or frozenset(pair) in strangers)
    ]
    chosen: list[Block] = []
    busy: set[int] = set()
    for pair in sorted(pairs, key=lambda pair: -tells[pair]):
        if not busy.intersection(pair):
            busy.update(pair)
            chosen.append(pair)
    return chosen
