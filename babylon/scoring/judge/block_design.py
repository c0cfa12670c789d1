"""Block design: the choice of trajectories that are judged together, and their order.

A seed determines every choice, so that a repeated run asks the same prompts. In the first pass the
blocks form a ring. Each block shares one trajectory with the next; this anchor puts both on one
scale, and closing the ring shows how well that works. The first block is asked again in reversed
order, because only a repetition shows how reliable the judge is. Later passes ask unstable items in
new blocks, and list those early that were listed late before. Pairs are chosen by the information
of their answer. With a strong bias for the first place these pairs are not the neighbours.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise, permutations
from math import ceil
from random import Random
from statistics import fmean

from babylon.scoring.judge.calibrate import Floats
from babylon.scoring.judge.group_prompts import Block


def ring_blocks(items: int, size: int, random: Random) -> list[Block]:
    """Return blocks of at most ``size`` around a ring of all items, or one block if all fit."""
    order = random.sample(range(items), items)
    if size == 1:
        return [(item,) for item in order]
    if items <= size:
        return [tuple(order)]
    count = ceil(items / (size - 1))
    cuts = [round(block * items / count) for block in range(count + 1)]
    blocks = [[order[i % items] for i in range(start, end + 1)] for start, end in pairwise(cuts)]
    if size == 2:  # each item is first once and second once, so a bias for a place cancels
        return [tuple(block) for block in blocks]
    return [tuple(random.sample(block, len(block))) for block in blocks]


def mixed_blocks(
    items: Sequence[int], size: int, places: Mapping[int, Sequence[float]], random: Random
) -> list[Block]:
    """Return blocks of two or more items in new company. Items listed late so far come first."""
    mixed = random.sample(list(items), len(items))
    count = ceil(len(mixed) / size)
    cuts = [round(block * len(mixed) / count) for block in range(count + 1)]
    return [
        tuple(sorted(mixed[start:end], key=lambda item: -fmean(places[item])))
        for start, end in pairwise(cuts)
    ]


def informative_pairs(
    order: Sequence[int], asked: Set[Block], unstable: Set[int], information: Floats
) -> list[Block]:
    """Return new pairs, the most informative first, with each item in at most one.

    ``information[i, j]`` is that of the pair with i listed first. A pair needs an ``unstable`` item
    or neighbours in the ``order`` that were never compared.
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
    for pair in sorted(pairs, key=lambda pair: -information[pair]):
        if not busy.intersection(pair):
            busy.update(pair)
            chosen.append(pair)
    return chosen
