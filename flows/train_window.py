"""One window from recorded play to a served policy, on the one line of policies."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from prefect import flow
from prefect.runtime import flow_run

from babylon.blocks.form import BlockName, WindowForm, WindowName
from babylon.blocks.load import settings_with
from babylon.core.errors import SupersededError
from babylon.core.types import WindowResult
from babylon.core.windows import Window
from babylon.flows.eight_stages import eight_stages
from babylon.flows.gpu_stage import GpuStages, Placement
from babylon.scoring.scorer import require_scorer
from babylon.stages.pending import window_to_train
from babylon.store import Store, open_store
from babylon.tasks.ending import named, with_pages

log = logging.getLogger("babylon.flows")
UPDATES = 3  # of one window in a run; each one after the first follows a change of the champion


@flow(name="train-window", flow_run_name=lambda: flow_run.parameters["window_id"] or "newest")
async def train_window(
    window_id: WindowName | None = None,
    overrides: WindowForm = None,
    blocks: Sequence[BlockName] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one closed window: ``window_id``, else a half-finished one, else the newest ready one.

    If the champion changes before the window's policy is deployed, the window is trained again from
    the new champion, with the same scores.

    Args:
        window_id: Start of the window in UTC (2025-11-14T09:00), with ``+NAME`` of its recipe.
        overrides: Settings of this run, by group.
        blocks: Names of blocks to take settings from (``"babylon-database/live"``).
        placement: Run training and checkpoint validation here, or on the ``gpu`` work pool.

    Raises:
        WindowNotReadyError: The named window is still being played.
        SupersededError: The champion changed during each of three updates. The window stays scored.
        BabylonError: A stage failed; the window's row keeps the reason.
    """
    settings = await settings_with(overrides, blocks)
    require_scorer(settings.scoring.scorer, settings.judge)  # now, not after three stages
    gpu = GpuStages(settings, overrides, blocks, placement)
    async with open_store(settings) as store:
        window = await window_to_train(store, settings.windows, settings.quality, window_id)
        finish = partial(_finish, store, gpu)
        async with with_pages(store, window.key):
            for _ in range(UPDATES - 1):
                try:
                    return named(await eight_stages(store, gpu, window, finish))
                except SupersededError as error:
                    log.warning("window %s is trained again: %s", window.key, error)
            return named(await eight_stages(store, gpu, window, finish))


async def _finish(store: Store, gpu: GpuStages, window: Window) -> None:
    """Validate and deploy a half-finished window that another run left. Its failure is its own."""
    own = {"minutes": window.minutes, "recipe": "", "include_late": False}
    gpu = replace(gpu, settings=gpu.settings.replace(windows=own))
    try:
        result = await eight_stages(store, gpu, window, partial(_finish, store, gpu))
        log.info("window %s was half-finished and is %s now", window.key, result.status)
    except Exception as error:  # the window that waits must survive every failure of this one
        log.error("window %s was half-finished: %s", window.key, error)
