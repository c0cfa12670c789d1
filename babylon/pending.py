"""Which windows wait to be trained."""

from datetime import datetime, timedelta

from babylon.readiness import WindowReport, window_reports
from babylon.settings import Settings
from babylon.store import Store
from babylon.windows import Window, WindowState, last_complete_window, parse_window_id


async def pending_windows(
    store: Store, settings: Settings, now: datetime, hours: float | None = None
) -> list[Window]:
    """Windows that are over and ready, or that a run left half-finished, oldest first.

    ``hours`` back from now, by default the settings' lookback. A window that somebody works on is
    left alone, and one of another length than the settings' is not ours to train.
    """
    return [window for window, _ in await _waiting(store, settings, now, hours)]


async def window_to_train(store: Store, settings: Settings, now: datetime) -> Window:
    """When nobody names one: the oldest that is half-finished, else the newest that waits, else
    the last to close, which will say why.
    """
    waiting = await _waiting(store, settings, now, None)
    half_finished = [window for window, state in waiting if state == WindowState.TRAINED]
    if half_finished:
        return half_finished[0]
    if waiting:
        return waiting[-1][0]
    return last_complete_window(now - timedelta(seconds=settings.grace_s), settings.minutes)


async def _waiting(
    store: Store, settings: Settings, now: datetime, hours: float | None
) -> list[tuple[Window, WindowState]]:
    lookback = hours or settings.lookback_hours
    reports = await window_reports(store, settings, lookback_hours=lookback, now=now)
    return [
        (parse_window_id(report.window_id, report.minutes), report.state)
        for report in reports
        if report.minutes == settings.minutes and _waits(report)
    ]


def _waits(report: WindowReport) -> bool:
    if report.state == WindowState.TRAINED:
        return not report.leased
    return report.ready
