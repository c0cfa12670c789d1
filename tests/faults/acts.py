"""Acts of a worker beside the flow: an agent's recorder, the game's outcomes, a base model."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from babylon.cli.output import fail
from babylon.core.errors import BabylonError
from babylon.core.settings_loading import load_settings
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.recorder import Action, LlmCall, MarketOutcomesTracker, TrajectoryRecorder
from babylon.store import Store, open_store
from babylon.store.policies import ensure_base
from tests.faults.world import WINDOW


def recorder() -> int:
    return _with_store(_record)


def outcomes() -> int:
    return _with_store(_outcomes)


def base() -> int:
    return _with_store(_base)


def _with_store(act: Callable[[Store], Awaitable[object]]) -> int:
    async def run() -> None:
        async with open_store(load_settings()) as store:
            await act(store)

    try:
        asyncio.run(run())
    except BabylonError as error:
        return fail(error, json=False)
    return 0


async def _record(store: Store) -> None:
    recorder = TrajectoryRecorder(store, clock=lambda: WINDOW.start)
    recorder.start("late agent", trajectory_id="recorded")
    call = LlmCall(
        model="babylon",
        system_prompt="",
        user_prompt="m1 0.50",
        response="hold",
        temperature=1.0,
        max_tokens=8,
        purpose="action",
    )
    recorder.step(
        "recorded",
        environment_state={"agentBalance": 1000, "agentPnL": 0, "openPositions": 0},
        llm_calls=[call],
        action=Action(action_type="HOLD", success=True, parameters={}),
        reward=0.0,
    )
    await recorder.finish("recorded")


async def _outcomes(store: Store) -> None:
    tracker = MarketOutcomesTracker(store, clock=lambda: WINDOW.end)
    for minute, price in ((1, 100.0), (50, 110.0)):
        tracker.price("TSLAI", price, at=WINDOW.start + timedelta(minutes=minute))
    tracker.probability("m1", "Will it rain?", 0.6, at=WINDOW.start)
    tracker.resolve("m1", "YES", at=WINDOW.start + timedelta(minutes=30))
    await tracker.write(WINDOW.id)


async def _base(store: Store) -> None:
    await ensure_base(store, uri="/base", base_model="tiny")


def deploy(mode: str) -> int:
    """By hand: policy 2 serves everybody (``replace``), or is compared with the champion."""
    order = ChangeRequest(author="operator", reason="by hand", force=True, drain_s=0.0)

    async def act(store: Store) -> None:
        if mode == "replace":
            await replace_champion(store, checks_under(load_settings()), 2, order)
        elif mode == "ab":
            await run_experiment(store, checks_under(load_settings()), "ab", 2, 0.5, order)
        else:
            await roll_back(store, order)

    return _with_store(act)
