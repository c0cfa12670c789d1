"""Which windows the dataset consists of (those that were trained), and its three tables."""

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
    """The scored manifests of the trained windows of a UTC day, or of all, oldest first."""
    rows = sorted(await list_windows(store), key=lambda row: row.window_id)
    return [
        row.scored
        for row in rows
        if row.state in TRAINED
        and row.scored
        and (day is None or row.window_id.startswith(day.isoformat()))
    ]


async def build_tables(store: Store, settings: Settings, scored: Scored) -> list[Published]:
    """One file of each table: trajectories, scenarios, model_performance.

    Scenarios that the rows do not tell are left out, and the log says why.
    """
    trajectories = publish_window(settings, scored)
    scenarios, rebuilt = publish_scenarios(settings, scored)
    for skipped in rebuilt.skipped:
        log.warning("window %s: %s", skipped.window_id, skipped.reason)
    return [trajectories, scenarios, await publish_performance(store, settings, scored)]
