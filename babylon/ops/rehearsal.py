"""The rehearsal: a demo in real time. A live fleet plays, and the schedule of ``up`` trains.

All that production has is there: services under the supervisor, Prefect's schedule and workers,
windows that close by the clock, the gate on the fleet's own worlds. Only the model is tiny and the
game is simulated.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import AT_REST, Window, window_at
from babylon.game.fleet.fleet_plan import TICK, FleetPlan
from babylon.game.fleet.play_fleet import FleetResult
from babylon.game.fleet.spawn import run_fleet
from babylon.ops.demo import (
    DemoGame,
    DemoReport,
    PlayHour,
    Say,
    Step,
    hour_line,
    report_hours,
)
from babylon.ops.up import up
from babylon.store import Store, open_store
from babylon.store.windows import get_window
from babylon.training.base_model import resolve_base_in_a_thread

WINDOWS = 4  # of a rehearsal, unless asked otherwise
_POLL_S = 2.0


async def run_rehearsal(
    settings: Settings,
    models: Path,
    game: DemoGame,
    *,
    windows: int,
    shared: bool,
    say: Say,
    step: Step,
) -> DemoReport:
    """Start the services, and let a fleet play until ``windows`` windows are trained.

    The services go on after it. ``models`` caches the embedded base model, as for ``run_demo``.

    Raises:
        BabylonError: A port is busy, a service does not start, or the gateway does not answer.
    """
    started = time.monotonic()

    def making_model(done: int, total: int) -> None:
        step("base model", done, total)

    base = await resolve_base_in_a_thread(settings.model.base, models, settings.seed, making_model)
    settings = settings.replace(model={"base": str(base)})
    await up(settings, say=say)
    say(f"agents play through {settings.serving.endpoint}, one decision a minute")
    say(f"the status page is at http://127.0.0.1:{settings.serving.admin_port}/")
    async with open_store(settings) as store:

        def plan() -> FleetPlan:
            rest = live_plan(game, settings.windows.minutes, datetime.now(UTC))
            return replace(rest, shared=shared, seed=settings.seed)

        async def play(plan: FleetPlan) -> FleetResult:
            return await run_fleet(store, settings, plan, "llm")

        try:
            hours = await _hours(store, windows, plan, play, say, step)
        except ExceptionGroup as failed:  # of the play, and of a wait for a window
            raise failed.exceptions[0] from failed
        say("base and final policy meet on unseen scenarios")
        return await report_hours(store, settings.home, settings.seed, game, hours, started)


async def _hours(
    store: Store,
    windows: int,
    next_plan: Callable[[], FleetPlan],
    play: PlayHour,
    say: Say,
    step: Step,
) -> list[tuple[WindowResult, FleetResult]]:
    """Play the windows; the schedule trains each while the next is played."""
    ended: list[asyncio.Task[tuple[WindowResult, FleetResult]]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(windows):
            step("windows played", number, windows)
            plan = next_plan()
            window = window_at(plan.start, plan.window_minutes)
            fleet = await play(plan)
            ended.append(group.create_task(_end(store, window, fleet, say)))
        step("windows played", windows, windows)
    return [one.result() for one in ended]


def live_plan(game: DemoGame, minutes: int, now: datetime) -> FleetPlan:
    """Plan the rest of the present window of ``minutes``, or the next if no game fits in it."""
    start = now.replace(second=0, microsecond=0)
    end = window_at(start, minutes).end
    if end - start < game.rules.ticks * TICK:
        start, end = end, end + timedelta(minutes=minutes)
    return FleetPlan(
        start=start,
        duration_min=int((end - start) / TICK),
        agents=game.agents,
        rules=game.rules,
        live=True,
        window_minutes=minutes,
    )


async def _end(
    store: Store, window: Window, fleet: FleetResult, say: Say
) -> tuple[WindowResult, FleetResult]:
    """Wait until a run of the schedule has ended the window."""
    while (row := await get_window(store, window.key)) is None or row.state not in AT_REST:
        await asyncio.sleep(_POLL_S)
    result = WindowResult(
        window_id=window.id, status=row.state, reason=row.reason or "", metrics=row.metrics
    )
    say(hour_line(result, fleet))
    return result, fleet
