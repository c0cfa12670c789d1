"""An experiment as rows: routes, the agents' calls and what they played."""

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import numpy as np

from babylon.store import Store
from babylon.store.calls import insert_calls
from babylon.store.policies import ensure_base
from babylon.store.routes import Split, commit_route, current_route
from tests.conftest import real_rows
from tests.integration.game import insert
from tests.unit.serving.gateway.calls import call

HOUR = timedelta(hours=1)
SALT = "b5a1c0ffee"
HOURS = 20
PLAYED = datetime(2025, 11, 14, 9, tzinfo=UTC)  # simulated play is dated into the past


@dataclass
class World:
    """Agents, dealt by their number; what they do is kept and written at once (``write``)."""

    store: Store
    route: int = 0
    numbers: "count[int]" = field(default_factory=count)
    played: Counter[str] = field(default_factory=Counter)
    calls: list[Any] = field(default_factory=list)
    plays: list[dict[str, Any]] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)

    async def begin(self, share: float = 0.5, *, mode: str = "ab", salt: str = SALT) -> None:
        """The next route: policy 1 beside the champion 0."""
        self.route = await commit_route(
            self.store,
            policy_version=0,
            author="test",
            reason="test",
            expected_route_version=(await current_route(self.store)).route_version,
            split=Split(mode=mode, challenger_version=1, share=share, salt=salt),  # type: ignore[arg-type]
        )

    async def end(self, winner: int) -> None:
        await commit_route(
            self.store,
            policy_version=winner,
            author="test",
            reason="test",
            expected_route_version=self.route,
        )

    def play(
        self,
        agent: str,
        arm: str,
        pnl: float,
        *,
        name: str | None = None,
        calls: int = 1,
        **changes: Any,
    ) -> str:
        """A trajectory with its calls under the present route; ``changes`` of its row.

        The plays of each arm take turns in the hours.
        """
        trajectory = name or f"{agent}-{len(self.plays)}"
        start = PLAYED + HOUR * (self.played[arm] % HOURS)
        self.played[arm] += 1
        for _ in range(calls):
            self.call(agent, arm, trajectory_id=trajectory)
        changes = {"startTime": start.replace(tzinfo=None).isoformat()} | changes
        self.row(agent, trajectory, pnl, **changes)
        return trajectory

    def call(self, agent: str, arm: str, **changes: Any) -> None:
        number = next(self.numbers)
        defaults = dict(
            agent_id=agent,
            arm=arm,
            route_version=self.route,
            policy_version=int(arm == "challenger"),
            started_at=datetime.now(UTC) + timedelta(milliseconds=number),
            latency_ms=100 + number % 7,
        )
        self.calls.append(call(number, **(defaults | changes)))

    def row(self, agent: str, trajectory: str, pnl: float, **changes: Any) -> None:
        """Lifetime P&L was 70 when the play began."""
        self.agents.add(agent)
        now = datetime.now(UTC).replace(tzinfo=None).isoformat()
        steps = (
            '[{"stepNumber":0,"timestamp":1,"environmentState":{"agentBalance":2000,"agentPnL":70},'
            '"llmCalls":[],"action":{"actionType":"HOLD","success":true}}]'
        )
        row = {
            **real_rows("trajectories")[0],
            "id": trajectory,
            "trajectoryId": trajectory,
            "agentId": agent,
            "startTime": PLAYED.replace(tzinfo=None).isoformat(),
            "createdAt": now,
            "finalPnL": 70 + pnl,
            "stepsJson": steps,
            "metricsJson": '{"episodeLength":10,"errorCount":1,"finalPnL":1}',
        }
        self.plays.append(row | changes)

    def fleet(
        self, gain: float, *, agents: int = 60, plays: int = 3, seed: int = 0, every: int = 2
    ) -> None:
        """Each plays a few times; every ``every``-th is the challenger's."""
        random = np.random.default_rng(seed)
        for number in range(agents):
            challenger = number % every == 0
            for _ in range(plays):
                pnl = float(random.normal(0, 100) + gain * challenger)
                self.play(f"a{number}", "challenger" if challenger else "champion", pnl)

    async def write(self) -> None:
        user = real_rows("users")[0]
        known = {row["id"] for row in await self.store.game.fetch('SELECT id FROM "User"')}
        game = replace(self.store, pool=self.store.game)  # where a game apart writes
        await insert(
            game,
            "users",
            [{**user, "id": a, "username": a} for a in sorted(self.agents - known)],
        )
        await insert(game, "trajectories", self.plays)
        await insert_calls(self.store, self.calls)
        self.plays, self.calls = [], []


async def world(store: Store) -> World:
    """Policies 0, which serves, and 1."""
    await ensure_base(store, uri="/nowhere/base", base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', '/nowhere/one', 'tiny')"
    )
    return World(store)
