"""The dataset's windows (all trained ones) and its three tables."""

import logging
from datetime import date

from babylon.core.settings import Settings
from babylon.core.types import Published, Scored
from babylon.core.windows import DONE, WindowState
from babylon.dataset.performance import publish_performance
from babylon.dataset.scenarios import publish_scenarios
from babylon.stages.publish import publish_window
from babylon.store import Store
from babylon.store.windows import list_windows

TRAINED = DONE | {WindowState.TRAINED}
log = logging.getLogger(__name__)


async def windows_of(store: Store, day: date | None = None) -> list[Scored]:
    """Return the scored manifests of trained windows, of one UTC day or all, oldest first."""
    rows = sorted(await list_windows(store), key=lambda row: row.window_id)
    return [
        row.scored
        for row in rows
        if row.state in TRAINED
        and row.scored
        and (day is None or row.window_id.startswith(day.isoformat()))
    ]


async def build_tables(store: Store, settings: Settings, scored: Scored) -> list[Published]:
    """Write a window's file of each table: trajectories, scenarios, model_performance.

    Scenarios that cannot be rebuilt from the rows are left out and logged.
    """
    trajectories = publish_window(settings.home, scored)
    scenarios, rebuilt = publish_scenarios(settings.home, scored)
    for skipped in rebuilt.skipped:
        log.warning("window %s: %s", skipped.window_id, skipped.reason)
    return [trajectories, scenarios, await publish_performance(store, settings.home, scored)]
