"""``babylon agents spawn``: one fleet from settings to recorded rows."""

from datetime import UTC, datetime
from typing import Literal

import httpx
import openai

from babylon.core.api_keys import local_key
from babylon.core.errors import ConfigError, DatabaseError
from babylon.core.settings import Settings
from babylon.core.windows import TRANSITIONS, WindowState
from babylon.game.fleet.answers import Answer, llm_answers, scripted_answers
from babylon.game.fleet.fleet_plan import FleetPlan, fleet_start
from babylon.game.fleet.play_fleet import FleetResult, Progress, play_fleet
from babylon.game.market.scenario import STARTER, Rules
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder
from babylon.store import Store, open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.windows import list_windows

PolicyName = Literal["scripted", "llm"]
MAX_CONNECTIONS = 128


async def spawn_agents(
    settings: Settings,
    *,
    agents: int,
    duration_min: int,
    policy: PolicyName,
    rules: Rules = STARTER,
    shared: bool = False,
    live: bool = False,
    progress: Progress | None = None,
) -> FleetResult:
    """Let ``agents`` play ``duration_min`` game minutes by ``rules``, each in its own copy of the
    market or in a ``shared`` one.

    Fast play is dated into the newest windows that are over and that no training has begun on,
    so they can be trained at once; ``live`` play takes place now, a decision a minute.
    """
    now = datetime.now(UTC)
    async with open_store(settings) as store:
        rows = await list_windows(store)
        taken = {
            row.window_id
            for row in rows
            if row.leased or WindowState.CLAIMED not in TRANSITIONS[row.state]
        }
        plan = FleetPlan(
            start=now if live else fleet_start(now, duration_min, settings.windows.minutes, taken),
            duration_min=duration_min,
            agents=agents,
            rules=rules,
            shared=shared,
            seed=settings.seed,
            live=live,
            window_minutes=settings.windows.minutes,
        )
        return await run_fleet(store, settings, plan, policy, progress=progress)


async def run_fleet(
    store: Store,
    settings: Settings,
    plan: FleetPlan,
    policy: PolicyName,
    *,
    progress: Progress | None = None,
) -> FleetResult:
    """Play a plan through the endpoint of ``settings`` (``llm``) or without it (``scripted``).
    On return every call is in the database.

    Raises:
        DatabaseError: the game's tables are somebody else's: simulated play has no place there.
    """
    if store.has_game_tables and not store.game_tables_ours:
        raise DatabaseError(
            "the database belongs to a live game, into which simulated play is not written:"
            " unset DATABASE_URL to play on the embedded one"
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
    await wait_until_recorded(store)
    return result
