"""Worlds that only the arena uses, and frozen suites of them.

A window's gate makes fresh worlds, seeded by its batch. On fixed worlds, the champion would be the
luckiest of all policies that played them, and every challenger would compete with that luck. The
leaderboard compares all players on one frozen ``Suite``. A suite's digest is stored in Postgres at
its first use; if its worlds change later, it is refused.

Fleets and transcripts seed their worlds with other prefixes (``fleet:``, ``transcript:``).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from babylon.core.errors import ArenaError
from babylon.evaluation.arena.play import play, scripted
from babylon.game.market.game import Game
from babylon.game.market.prompts import names_of, render_observation
from babylon.game.market.scenario import HOUR, STARTER, Rules, Scenario, make_scenario
from babylon.game.market.scripted import random_trader

_REFERENCE_WORLDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A frozen set of worlds. A changed set needs a new ``version``."""

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
        Suite(name="starter", version=3, rules=STARTER, scenarios=512),
        Suite(name="hour", version=6, rules=HOUR, scenarios=64),
    )
}


def find_suite(name: str) -> Suite:
    """Return the suite of that name.

    Raises:
        ArenaError: No suite has that name.
    """
    if name not in SUITES:
        raise ArenaError(f"no suite is called {name!r}: choose from {', '.join(SUITES)}")
    return SUITES[name]


def unseen_scenarios(
    purpose: str, name: str, count: int, rules: Rules | None = None
) -> list[Scenario]:
    """Make seeded worlds for one purpose only: ``arena``, ``gate`` or ``final``."""
    return [make_scenario(f"{purpose}:{name}:{number}", rules) for number in range(count)]


def digest(worlds: Sequence[Scenario]) -> str:
    """Return the sha256 of the worlds, and of the first worlds' prompts and played results.

    The results of a scripted agent, to the cent, are part of it because a change of the game's
    mechanics changes the worlds, even with the same questions and news.
    """
    sha = hashlib.sha256()
    for world in worlds:
        sha.update(msgspec.json.encode(world))
    first = list(islice(worlds, _REFERENCE_WORLDS))
    for world, pnl in zip(first, play(scripted(random_trader), first).pnl, strict=True):
        prompt = render_observation(Game(world), *names_of(world, 1))
        sha.update(msgspec.json.encode((f"{pnl:.2f}", prompt)))
    return sha.hexdigest()
