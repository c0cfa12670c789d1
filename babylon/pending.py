"""Which windows wait to be trained."""

from contextlib import suppress
from datetime import datetime

from babylon.errors import WindowError
from babylon.readiness import window_reports
from babylon.settings import Settings
from babylon.store import Store
from babylon.windows import Window, WindowState, last_complete_window, parse_window_id


async def pending_windows(
    store: Store, settings: Settings, now: datetime, hours: float | None = None
) -> list[Window]:
    """Closed windows that are ready, or that a run left half-finished, oldest first.

    ``hours`` back from now, by default the settings' lookback. A window that was skipped is taken
    up again only by naming it; one of another length than the settings' is not ours to train.
    """
    lookback = hours or settings.lookback_hours
    windows = []
    for report in await window_reports(store, settings, lookback_hours=lookback, now=now):
        unfinished = report.ready and report.state != WindowState.SKIPPED
        if unfinished or report.state == WindowState.TRAINED:
            with suppress(WindowError):
                windows.append(parse_window_id(report.window_id, settings.minutes))
    return windows


async def window_to_train(store: Store, settings: Settings, now: datetime) -> Window:
    """When nobody names one: the newest that waits, else the last to close, which will say why."""
    waiting = await pending_windows(store, settings, now)
    return waiting[-1] if waiting else last_complete_window(now, settings.minutes)
