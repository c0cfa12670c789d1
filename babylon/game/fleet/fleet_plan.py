"""A fleet's plan: its time divided into rounds, its agents divided into scenarios."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import pairwise
from uuid import uuid4

from babylon.core.windows import window_at
from babylon.game.market.prompts import name_of_agent
from babylon.game.market.scenario import STARTER, Rules, Scenario, make_scenario

TICK = timedelta(minutes=1)
MAX_TICKS = 10  # longest round, unless the rules' game is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A fleet to play: agents, time, rules and seed.

    Every agent decides once per game minute. Trajectory ids begin with ``fleet_id``, so that fleets
    of the same hour and seed do not collide. The same plan with the same ``fleet_id`` makes the
    same rows.
    """

    start: datetime
    duration_min: int
    agents: int
    agents_per_scenario: int = 8
    rules: Rules = STARTER  # ``ticks`` is replaced by the round's length
    shared: bool = False  # the agents of a scenario share one market
    seed: int = 0
    live: bool = False  # play in real time
    window_minutes: int = 60
    fleet_id: str = field(default_factory=lambda: uuid4().hex[:12])


def plan_rounds(plan: FleetPlan) -> list[tuple[datetime, int]]:
    """Return (start, ticks) of each round. A round lasts one game and ends with its window."""
    longest = max(MAX_TICKS, plan.rules.ticks)
    rounds = []
    moment, left = plan.start.astimezone(UTC), plan.duration_min
    while left > 0:
        until_end = window_at(moment, plan.window_minutes).end - moment
        ticks = min(left, longest, int(until_end / TICK))
        if ticks > 0:
            rounds.append((moment, ticks))
            moment += ticks * TICK
            left -= ticks
        else:
            moment += until_end
    return rounds


def fleet_start(
    now: datetime, duration_min: int, minutes: int, taken: Collection[str] = ()
) -> datetime:
    """Return the start of a fast fleet.

    It is the start of the newest consecutive complete windows that together hold ``duration_min``
    minutes. Windows in ``taken`` are excluded, because play added to a trained window is never
    trained.
    """
    window = window_at(now, minutes)
    free = 0
    while free * minutes < duration_min:
        window = window.previous()
        free = 0 if window.id in taken else free + 1
    return window.start


def shards(plan: FleetPlan) -> list[range]:
    """Divide the agents into scenarios, as evenly as possible."""
    tables = max(1, round(plan.agents / plan.agents_per_scenario))
    bounds = [plan.agents * table // tables for table in range(tables + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def deal(
    plan: FleetPlan, start: datetime, ticks: int, number: int
) -> list[tuple[Scenario, list[str]]]:
    """Return the scenarios of a round, each with its agents.

    Agents of one scenario id are compared. The id therefore carries a digest of the rules, unless
    they are the small game's, and of whether the market is shared. Live fleets of one window begin
    at any minute, on which the funding of perps depends.
    """
    window = window_at(start, plan.window_minutes)
    rules = replace(plan.rules, ticks=ticks)
    minute = start.hour * 60 + start.minute
    facts = (rules, plan.shared, *([minute] if plan.live and rules.perps else ()))
    kind = "" if rules == STARTER and not plan.shared else f"-{_digest(*facts)}"
    tables = []
    for shard, members in enumerate(shards(plan)):
        world = f"{window.id}-s{plan.seed}r{number}t{shard}"
        scenario = make_scenario(
            f"fleet:{world}",
            rules,
            name=f"{world}{kind}",
            start_minute=minute,
        )
        tables.append((scenario, [name_of_agent(index) for index in members]))
    return tables


def _digest(*facts: object) -> str:
    return blake2b(repr(facts).encode(), digest_size=3).hexdigest()
