"""Backfill: every window that waits, oldest first, each as a run of its own."""

import logging
from collections.abc import Sequence
from typing import Any

from prefect import flow

from babylon.blocks.load import settings_with
from babylon.core.errors import TrainingError
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.attempt import attempt
from babylon.flows.gpu_stages import Placement
from babylon.stages.pending import pending_windows
from babylon.store import open_store
from babylon.tasks.stage import announce

log = logging.getLogger("babylon.flows")
STAGE = "windows"  # under which progress is announced


@flow(name="backfill")
async def backfill(
    hours: int | None = None,
    overrides: dict[str, Any] | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
    first: str | None = None,
    last: str | None = None,
    limit: int | None = None,
) -> list[WindowResult]:
    """Train the windows from ``first`` to ``last`` (dates or window ids), else of the last
    ``hours``, by default of the settings' lookback; at most ``limit`` of them, where given.

    Oldest first, because each window trains the policy that the one before left. A run that ends
    early is simply started again: what is done is done. A window that fails is reported and the
    next one is tried; a deployed run fails at its end because of it, so that Prefect shows it red
    and tells whoever asked to be told.

    Raises:
        TrainingError: of a deployed run; names the windows that failed.
    """
    settings = await settings_with(overrides, blocks)
    async with open_store(settings) as store:
        waiting = await pending_windows(store, settings, hours=hours, first=first, last=last)
    windows = waiting[:limit]
    if len(windows) < len(waiting):
        log.info("%d windows wait, the oldest %d are trained", len(waiting), len(windows))
    results: list[WindowResult] = []
    for window in windows:
        announce(STAGE, len(results), len(windows))
        results.append(await attempt(window.key, overrides, blocks, placement))
        log.info("%s: %s, %d of %d", window.key, results[-1].status, len(results), len(windows))
    if windows:
        announce(STAGE, len(results), len(windows))
    failed = [result for result in results if result.status == WindowState.FAILED]
    if failed and placement == "deployed":
        reasons = "; ".join(f"{result.window_id}: {result.reason}" for result in failed)
        raise TrainingError(f"{len(failed)} of {len(results)} windows failed: {reasons}")
    return results
