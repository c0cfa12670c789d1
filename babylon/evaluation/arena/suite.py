"""Worlds that are kept for the arena alone, and how a set of them is recognised again.

A window's gate takes fresh worlds, seeded by its batch: on worlds that are always the same, a
champion would be the luckiest of all that played them, and each hour's challenger would meet that
luck. The leaderboard, where all are to be compared, takes one frozen ``Suite``. Its digest is in
Postgres from its first use on; worlds that no longer match it are refused, not quietly compared.

Fleets and transcripts draw worlds under other names (``fleet:``, ``transcript:``).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from babylon.core.errors import ArenaError
from babylon.evaluation.arena.play import NAME, play, scripted
from babylon.game.market.game import Game
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import HOUR, STARTER, Rules, Scenario, make_scenario
from babylon.game.market.scripted import random_trader

_REFERENCE_WORLDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A frozen set of worlds. Another set of the same name is another ``version``."""

    name: str
    version: int
    rules: Rules
    scenarios: int

    def worlds(self) -> list[Scenario]:
        return unseen_scenarios("arena", f"{self.name}:{self.version}", self.scenarios, self.rules)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


SUITES = {
    suite.name: suite
    for suite in (
        Suite(name="starter", version=1, rules=STARTER, scenarios=512),
        Suite(name="hour", version=1, rules=HOUR, scenarios=64),
    )
}


def find_suite(name: str) -> Suite:
    """Raises ArenaError when there is none of that name."""
    if name not in SUITES:
        raise ArenaError(f"no suite is called {name!r}: there are {', '.join(SUITES)}")
    return SUITES[name]


def unseen_scenarios(
    purpose: str, name: str, count: int, rules: Rules | None = None
) -> list[Scenario]:
    """Seeded worlds kept for one purpose: ``arena``, ``gate`` or ``final``."""
    return [make_scenario(f"{purpose}:{name}:{number}", rules) for number in range(count)]


def digest(worlds: Sequence[Scenario]) -> str:
    """sha256 over what the worlds hold, and over how they are shown and played.

    The second half is a scripted agent's play of the first few, to the cent, and their prompts: a
    change of the game's mechanics makes other worlds of the same questions and news.
    """
    sha = hashlib.sha256()
    for world in worlds:
        sha.update(msgspec.json.encode(world))
    first = list(islice(worlds, _REFERENCE_WORLDS))
    for world, pnl in zip(first, play(scripted(random_trader), first).pnl, strict=True):
        sha.update(msgspec.json.encode((f"{pnl:.2f}", render_observation(Game(world), NAME))))
    return sha.hexdigest()
