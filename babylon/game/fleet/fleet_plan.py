"""Who plays when: a fleet's time cut into rounds, its agents dealt into scenarios of a few."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import pairwise
from uuid import uuid4

from babylon.core.windows import window_at
from babylon.game.market.scenario import STARTER, Rules, Scenario, make_scenario

TICK = timedelta(minutes=1)
MAX_TICKS = 10  # of a round, where the rules have no longer game


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Who plays when. ``duration_min`` in game minutes, one decision a minute and agent.

    Trajectory ids begin with ``fleet_id``, so that fleets of one hour and seed stand side by side;
    with a given one the same plan makes the same rows again.
    """

    start: datetime
    duration_min: int
    agents: int
    agents_per_scenario: int = 8
    rules: Rules = STARTER  # of every scenario, but for its length
    shared: bool = False  # the agents of a scenario trade in one market
    seed: int = 0
    live: bool = False  # wait for the real clock
    window_minutes: int = 60
    fleet_id: str = field(default_factory=lambda: uuid4().hex[:12])


def plan_rounds(plan: FleetPlan) -> list[tuple[datetime, int]]:
    """(start, ticks) of each round: as long as a game lasts, never across the end of a window."""
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
    """Where a fast fleet plays: in the newest windows in a row that are over, ``duration_min`` of
    them, and none of which is ``taken``: what is played into a trained window is never trained."""
    window = window_at(now, minutes)
    free = 0
    while free * minutes < duration_min:
        window = window.previous()
        free = 0 if window.id in taken else free + 1
    return window.start


def shards(plan: FleetPlan) -> list[range]:
    """Agents dealt into tables as evenly as possible."""
    tables = max(1, round(plan.agents / plan.agents_per_scenario))
    bounds = [plan.agents * table // tables for table in range(tables + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def deal(
    plan: FleetPlan, start: datetime, ticks: int, number: int
) -> list[tuple[Scenario, list[str]]]:
    """The scenarios of a round with the agents that play each.

    Worlds of other rules, and markets that are shared, have names of their own: agents are compared
    under one name.
    """
    window = window_at(start, plan.window_minutes)
    rules = replace(plan.rules, ticks=ticks)
    kind = "" if rules == STARTER and not plan.shared else f"-{_digest(rules, plan.shared)}"
    tables = []
    for shard, members in enumerate(shards(plan)):
        world = f"{window.id}-s{plan.seed}r{number}t{shard}"
        scenario = make_scenario(
            f"fleet:{world}",
            rules,
            name=f"{world}{kind}",
            start_minute=start.hour * 60 + start.minute,
        )
        tables.append((scenario, [f"agent-{index}" for index in members]))
    return tables


def _digest(*facts: object) -> str:
    return blake2b(repr(facts).encode(), digest_size=3).hexdigest()
