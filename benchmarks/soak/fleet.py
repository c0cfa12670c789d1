"""Agents of the soak: they ask until they are answered, and remember every answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import openai

from babylon.core.errors import DatabaseError, ServingError
from babylon.core.windows import Window
from babylon.game.fleet.answers import Answer, Reply, Turn, llm_answers
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.play_fleet import play_fleet
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder
from babylon.store import Store
from babylon.store.connection import UNREACHABLE

AGENTS, PLAY_MIN, SEED = 8, 3, 7
_PAUSE_S = 0.3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: the version that gave it, and the time of day before and after it."""

    version: int
    asked: datetime
    at: datetime


@dataclass
class Played:
    """Observations of the agents.

    ``answered``: by call. ``calls``: those of each window that was played to its end. ``stored``:
    the version of each answered call that was once found in Postgres.
    """

    windows: list[str] = field(default_factory=list)
    answered: dict[str, Answered] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[float, bool]] = field(default_factory=list)  # clock, answered

    async def look_for_calls(self, store: Store) -> None:
        """Note which answered calls Postgres has, before retention removes them."""
        rows = await store.pool.fetch(
            "SELECT call_id, policy_version FROM babylon.calls WHERE call_id = ANY($1)",
            list(self.answered.keys() - self.stored.keys()),
        )
        self.stored.update((row[0], row[1]) for row in rows)


class _StubbornRecorder(TrajectoryRecorder):
    """Writes a trajectory again until Postgres has it."""

    async def finish(self, trajectory_id: str, **about: Any) -> None:
        finish = partial(super().finish, trajectory_id, **about)

        async def write() -> None:
            try:
                await finish()
            except DatabaseError as error:
                if "stored already" not in str(error):  # a commit whose answer was lost
                    raise

        await _until_done(write)


def stubborn(answer: Answer, played: Played) -> Answer:
    """Return an ``Answer`` that asks again after each failure."""

    async def asked(turn: Turn) -> Reply:
        while True:
            asked_at = datetime.now(UTC)
            try:
                reply = await answer(turn)
            except (ServingError, openai.OpenAIError):
                played.moments.append((time.monotonic(), False))
                await asyncio.sleep(_PAUSE_S)
                continue
            played.moments.append((time.monotonic(), True))
            assert reply.call_id is not None and reply.model_version is not None
            played.answered[reply.call_id] = Answered(
                int(reply.model_version), asked_at, datetime.now(UTC)
            )
            return reply

    return asked


async def play_windows(
    store: Store,
    client: openai.AsyncOpenAI,
    model: str,
    first: datetime,
    played: Played,
    may_play: Callable[[], Awaitable[bool]],
) -> None:
    """Play one window after the other for ever, each when ``may_play`` allows it."""
    recorder, tracker = _StubbornRecorder(store), _StubbornTracker(store)
    answer = stubborn(llm_answers(client, model, SEED), played)
    while True:
        while not await may_play():
            await asyncio.sleep(1)
        number = len(played.windows)
        window = Window(first + timedelta(hours=number))
        plan = FleetPlan(
            start=window.start,
            duration_min=PLAY_MIN,
            agents=AGENTS,
            seed=SEED,
            fleet_id=f"soak-{number}",
        )
        before = len(played.answered)
        await play_fleet(plan, answer, recorder, tracker)
        played.calls[window.id] = list(played.answered)[before:]
        played.windows.append(window.id)


class _StubbornTracker(MarketOutcomesTracker):
    """Writes a window's outcomes again until Postgres has them."""

    async def write(self, window_id: str) -> int:
        return await _until_done(partial(super().write, window_id))


async def _until_done(write: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await write()
        except UNREACHABLE:
            await asyncio.sleep(_PAUSE_S)
