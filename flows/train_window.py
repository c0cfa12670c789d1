"""One window from recorded play to a served policy: the whole loop on one screen."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from babylon.blocks.load import settings_with
from babylon.core.errors import AlreadyTrainedError, WindowNotReadyError
from babylon.core.metrics import window_metrics
from babylon.core.settings import Settings
from babylon.core.types import Claim, Scored, WindowResult
from babylon.core.windows import Window, WindowState, check_settled, parse_window_id
from babylon.flows.gpu_stages import Placement, on_gpu
from babylon.scoring.scorer import require_scorer
from babylon.stages.claim import claimed, commit_collected, commit_scored, taken_up
from babylon.stages.pending import window_to_train
from babylon.store import Store, open_store
from babylon.store.database_clock import read_clock
from babylon.store.late import count_late, note_late
from babylon.store.windows import get_window, set_state
from babylon.tasks.collect import collect
from babylon.tasks.deploy import deploy
from babylon.tasks.dropout import dropout
from babylon.tasks.publish import publish
from babylon.tasks.retire import retire
from babylon.tasks.score import score
from babylon.tasks.track import track
from babylon.tasks.validate import validate

log = logging.getLogger("babylon.flows")


@flow(name="train-window", flow_run_name=lambda: flow_run.parameters["window_id"] or "newest")
async def train_window(
    window_id: str | None = None,
    overrides: dict[str, Any] | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one closed window: ``window_id``, else a half-finished one, else the newest that waits.

    A window that cannot teach anything ends ``skipped``; one that an earlier run finished is left
    alone; one whose run died after training goes on at validation.

    Args:
        overrides: Settings by name, over environment and blocks (``{"min_agents": 5}``).
        blocks: Names of blocks to take settings from (``"babylon-database/live"``).
        placement: Where training and validation run: here, or on the ``gpu`` work pool.

    Raises:
        WindowNotReadyError: The window is still being played.
        BabylonError: A stage failed; the window's row keeps the reason.
    """
    settings = await settings_with(overrides, blocks)
    require_scorer(settings.scoring.scorer, settings.judge)
    async with open_store(settings) as store:
        window = await _choose(store, settings, window_id)
        try:
            async with claimed(store, settings, window) as claim:
                started = time.monotonic()
                scored, trained = await taken_up(store, settings, claim)
                scored = scored or await _scored(store, settings, claim, window)
                candidate = await on_gpu(scored, trained, overrides, blocks, placement)
                deployed = await deploy(settings, candidate.verdict)
                state = WindowState.DEPLOYED if deployed.deployed else WindowState.REJECTED
                minutes = (time.monotonic() - started) / 60
                metrics = {
                    **window_metrics(
                        scored, candidate.trained, candidate.verdict, deployed, minutes
                    ),
                    "late": await _late(store, window),
                }
                reason = deployed.reason
                await publish(settings, scored)
                await set_state(store, claim, state, reason=reason, metrics=metrics)
        except AlreadyTrainedError as error:
            return await _finished_before(store, window, str(error))
        except WindowNotReadyError as error:
            return WindowResult(window_id=window.key, status=WindowState.SKIPPED, reason=str(error))
    await _afterwards(window, track, settings, metrics)
    await _afterwards(window, retire, settings)
    return WindowResult(window_id=window.key, status=state, reason=reason, metrics=metrics)


async def _afterwards(window: Window, task: Any, *arguments: object) -> None:
    """A failure is the task's own, and logged: the window is finished and stays so."""
    ended = await task(*arguments, return_state=True)
    if not ended.is_completed():
        log.error("window %s is finished; %s after it: %s", window.key, task.name, ended.message)


async def _choose(store: Store, settings: Settings, window_id: str | None) -> Window:
    clock = await read_clock(store)
    if window_id is None:
        return await window_to_train(store, settings, clock)
    window = parse_window_id(window_id, settings.windows.minutes)
    check_settled(window, clock, settings.windows.grace_s)
    return replace(window, recipe=window.recipe or settings.windows.recipe)


async def _scored(store: Store, settings: Settings, claim: Claim, window: Window) -> Scored:
    collected = await collect(settings, claim, window)
    await commit_collected(store, collected)
    validated = await validate(settings, collected)
    await set_state(store, claim, WindowState.VALIDATED)
    thinned = await dropout(settings, validated)
    scored = await score(settings, thinned)
    await commit_scored(store, settings, scored)
    return scored


async def _late(store: Store, window: Window) -> int:
    await note_late(store, window.minutes, window.start, window.end)
    return await count_late(store, window.id)


async def _finished_before(store: Store, window: Window, reason: str) -> WindowResult:
    row = await get_window(store, window.key)
    assert row is not None  # the claim was refused because of it
    return WindowResult(
        window_id=window.key, status=row.state, reason=reason, changed=False, metrics=row.metrics
    )
