"""A match of champion and challenger, played in batches until there is a ruling."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from babylon.core.memory import free_memory_is_kept
from babylon.core.types import Ruling
from babylon.evaluation.arena.betting import sequence
from babylon.evaluation.arena.confidence import Interval
from babylon.evaluation.arena.play import Decide, Floats, Plays, joined, play
from babylon.evaluation.arena.ruling import Standings, fewer_copies, ruled
from babylon.evaluation.arena.worlds import GateWorlds, Source

Progress = Callable[[int, int], None]  # (scenarios played, scenarios at most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The paired difference in credited P&L after ``scenarios`` scenarios."""

    scenarios: int
    difference: Interval


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """A finished match: both players' results, the looks, the ruling and the worlds played."""

    champion: Plays
    challenger: Plays
    looks: tuple[Look, ...]
    ruling: Ruling
    reason: str
    worlds: dict[Source, int]


async def compare(
    champion: Decide,
    challenger: Decide,
    worlds: GateWorlds,
    progress: Progress | None = None,
) -> Match:
    """Let both play the worlds, batch by batch, until there is a ruling."""
    before: list[Plays] = []
    after: list[Plays] = []
    crowds: dict[int, list[Floats]] = {copies: [] for copies in fewer_copies(worlds.seats)}
    looks: list[Look] = []
    ended = None
    with free_memory_is_kept():  # the players' forward passes, batch after batch
        for batch in worlds.batches:
            meet = partial(play, scenarios=batch.scenarios, seats=worlds.seats)
            # At once: an engine answers one player while the other's next prompts are written.
            both = [partial(meet, one, copies=worlds.seats) for one in (champion, challenger)]
            old, new = await asyncio.gather(*map(asyncio.to_thread, both))
            before.append(old)
            after.append(new)
            for copies, found in crowds.items():
                mixed = await asyncio.to_thread(meet, challenger, copies=copies, others=champion)
                found.append(mixed.pnl)
            standings = Standings(
                champion=joined(before),
                challenger=joined(after),
                crowds={copies: np.concatenate(found) for copies, found in crowds.items()},
            )
            credited = standings.differences(worlds)[0]
            difference = sequence(credited, worlds.budget)
            looks.append(Look(scenarios=len(credited.values), difference=difference))
            if progress is not None:
                progress(looks[-1].scenarios, worlds.budget)
            if ended := ruled(standings, worlds):
                break
    assert ended is not None  # the last look always rules
    return Match(
        champion=standings.champion,
        challenger=standings.challenger,
        looks=tuple(looks),
        ruling=ended[0],
        reason=ended[1],
        worlds=worlds.played(looks[-1].scenarios),
    )
