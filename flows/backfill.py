"""Backfill: every window that waits, oldest first, each as a run of its own."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from prefect import flow

from babylon.errors import TrainingError
from babylon.pending import pending_windows
from babylon.store import open_store
from babylon.types import WindowResult
from babylon.windows import WindowState
from blocks.load import settings_with
from flows.attempt import attempt
from flows.gpu_stages import Placement


@flow(name="backfill")
async def backfill(
    hours: int | None = None,
    overrides: dict[str, Any] | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> list[WindowResult]:
    """Train the windows of the last ``hours``, by default of the settings' lookback.

    Oldest first, because each window trains the policy that the one before left. A window that
    fails is reported and the next one is tried; a deployed run fails at its end because of it, so
    that Prefect shows it red and tells whoever asked to be told.

    Raises:
        TrainingError: of a deployed run; names the windows that failed.
    """
    settings = await settings_with(overrides, blocks)
    async with open_store(settings) as store:
        windows = await pending_windows(store, settings, datetime.now(UTC), hours)
    results = [await attempt(window.id, overrides, blocks, placement) for window in windows]
    failed = [result for result in results if result.status == WindowState.FAILED]
    if failed and placement == "deployed":
        reasons = "; ".join(f"{result.window_id}: {result.reason}" for result in failed)
        raise TrainingError(f"{len(failed)} of {len(results)} windows failed: {reasons}")
    return results
