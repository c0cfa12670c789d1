"""``babylon agents spawn``: plan a fleet, play it and record its rows."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import openai

from babylon.core.api_keys import local_key
from babylon.core.errors import ConfigError, DatabaseError
from babylon.core.numeric_manifest import is_numeric
from babylon.core.settings import Settings, WindowSettings
from babylon.core.windows import TRANSITIONS, WindowState
from babylon.game.fleet.answers import Answer, llm_answers, numeric_answers, scripted_answers
from babylon.game.fleet.fleet_plan import FleetPlan, fleet_start
from babylon.game.fleet.play_fleet import FleetResult, Progress, play_fleet
from babylon.game.market.scenario import STARTER, Rules
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.windows import list_windows

MAX_CONNECTIONS = 128


async def plan_fleet(
    store: Store,
    windows: WindowSettings,
    seed: int,
    *,
    agents: int,
    duration_min: int,
    rules: Rules = STARTER,
    shared: bool = False,
    live: bool = False,
) -> FleetPlan:
    """Return a plan for ``agents`` to play ``duration_min`` game minutes by ``rules``.

    Each agent plays its own copy of the market, or with ``shared`` the agents of a scenario share
    one. Fast play is dated into the newest windows whose grace period is over and whose training
    has not begun, so that they can be trained at once. ``live`` play takes place now, with one
    decision per minute.
    """
    now = datetime.now(UTC)
    settled = now - timedelta(seconds=windows.grace_s)
    # A training that has begun would not see the play.
    taken = {
        row.window_id
        for row in await list_windows(store)
        if row.leased or WindowState.CLAIMED not in TRANSITIONS[row.state]
    }
    return FleetPlan(
        start=now if live else fleet_start(settled, duration_min, windows.minutes, taken),
        duration_min=duration_min,
        agents=agents,
        rules=rules,
        shared=shared,
        seed=seed,
        live=live,
        window_minutes=windows.minutes,
    )


async def run_fleet(
    store: Store,
    settings: Settings,
    plan: FleetPlan,
    policy: str,
    *,
    progress: Progress | None = None,
) -> FleetResult:
    """Play a plan through the endpoint of ``settings`` (``llm``), by scripts (``scripted``), or by
    the exported numeric policy in the directory ``policy``.

    On return, every call is in the database.

    Raises:
        DatabaseError: The database belongs to a live game.
        ConfigError: The plan has no agent or no minute, or no policy has that name.
    """
    if policy not in ("llm", "scripted") and not is_numeric(policy):
        raise ConfigError(
            f"policy {policy!r} is neither llm, scripted nor the directory of an exported numeric"
            " policy: `babylon baseline export`"
        )
    if store.has_game_tables and not store.game_tables_ours:
        raise DatabaseError(
            "the database belongs to a live game, and simulated play is not written there:"
            " unset DATABASE_URL to use the embedded database"
        )
    if plan.agents < 1 or plan.duration_min < 1:
        raise ConfigError(
            f"{plan.agents} agents for {plan.duration_min} minutes: both must be at least 1"
        )
    recorder = TrajectoryRecorder(store, minutes=settings.windows.minutes)
    tracker = MarketOutcomesTracker(store, minutes=settings.windows.minutes)

    async def play(answer: Answer) -> FleetResult:
        return await play_fleet(plan, answer, recorder, tracker, progress=progress)

    if policy == "scripted":
        return await play(scripted_answers(plan.seed))
    if policy != "llm":
        return await play(numeric_answers(Path(policy)))
    limits = httpx.Limits(
        max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
    )
    async with openai.AsyncOpenAI(
        base_url=f"{settings.serving.endpoint.rstrip('/')}/v1",
        api_key=str(local_key(settings.home.root)),
        max_retries=2,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits),
    ) as client:
        result = await play(llm_answers(client, settings.model.name, plan.seed))
    # The gateway ships calls to the database after their answers; training must find them.
    await wait_until_recorded(store)
    return result
