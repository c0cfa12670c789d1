"""Backfill: every window that is ready, oldest first, each as a run of its own."""

import logging
from collections.abc import Sequence

from prefect import flow

from babylon.blocks.form import AtLeastOne, BlockName, DayOrWindow, WindowForm
from babylon.blocks.load import settings_with
from babylon.core.errors import TrainingError
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.attempt import attempt
from babylon.flows.gpu_stage import Placement
from babylon.stages.pending import pending_windows
from babylon.store import open_store
from babylon.tasks.experiment import review_running
from babylon.tasks.progress import announce
from babylon.tasks.retire import retention_is_due, retire
from babylon.tasks.stage import run_after

log = logging.getLogger("babylon.flows")
STAGE = "windows"  # name under which progress is announced


@flow(name="backfill")
async def backfill(
    hours: AtLeastOne | None = None,
    overrides: WindowForm = None,
    blocks: Sequence[BlockName] = (),
    placement: Placement = "inline",
    first: DayOrWindow | None = None,
    last: DayOrWindow | None = None,
    limit: AtLeastOne | None = None,
) -> list[WindowResult]:
    """Train the windows of a range, oldest first.

    Each window trains the policy that the window before it left. A run that ended early can be
    started again: finished windows are skipped. A window that fails is reported, and the next one
    is tried. At the end, also of a run without a window, retention runs if it is due.

    Args:
        hours: Train the windows of the last hours, by default of the lookback of the settings.
        overrides: Settings of this run, by group.
        blocks: Names of blocks to take settings from (``babylon-database/live``).
        placement: Run training and checkpoint validation here, or on the ``gpu`` work pool.
        first: Instead of ``hours``: the first date or window (2025-11-14T09:00), in UTC.
        last: The last date or window, inclusive.
        limit: Train at most this many windows, the oldest.

    Raises:
        TrainingError: of a deployed run, so that Prefect shows it as failed: names the windows that
            failed.
    """
    settings = await settings_with(overrides, blocks)
    async with open_store(settings) as store:
        # Also while training is on hold, when no window's run does it.
        await review_running(store, settings.windows, settings.experiment)
        waiting = await pending_windows(
            store, settings.windows, settings.quality, hours=hours, first=first, last=last
        )
    windows = waiting[:limit]
    if len(windows) < len(waiting):
        log.info("%d windows are ready, training the oldest %d", len(waiting), len(windows))
    results: list[WindowResult] = []
    for window in windows:
        announce(STAGE, len(results), len(windows))
        results.append(await attempt(window.key, overrides, blocks, placement))
        log.info("%s: %s, %d of %d", window.key, results[-1].status, len(results), len(windows))
    if windows:
        announce(STAGE, len(results), len(windows))
    # Not only after a window that ends: during a hold or an outage none does.
    if retention_is_due(settings.home):
        await run_after("the run", retire, settings)
    failed = [result for result in results if result.status == WindowState.FAILED]
    # A caller in this process reads the results; a deployed run shows only its state.
    if failed and placement == "deployed":
        reasons = "; ".join(f"{result.window_id}: {result.reason}" for result in failed)
        raise TrainingError(f"{len(failed)} of {len(results)} windows failed: {reasons}")
    return results
