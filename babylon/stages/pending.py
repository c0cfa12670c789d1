"""Which windows wait to be trained."""

from dataclasses import replace
from datetime import datetime, timedelta

from babylon.core.settings import Settings
from babylon.core.windows import (
    DONE,
    Clock,
    Window,
    WindowState,
    last_complete_window,
    parse_bound,
    parse_window_id,
)
from babylon.stages.readiness import WindowReport, window_reports
from babylon.store import Store
from babylon.store.connection import read_clock


async def pending_windows(
    store: Store,
    settings: Settings,
    *,
    hours: float | None = None,
    first: str | None = None,
    last: str | None = None,
    clock: Clock | None = None,
) -> list[Window]:
    """Windows that are over and ready, or that a run left half-finished, oldest first.

    From ``first`` (a date or window id), else of the last ``hours``, by default the settings'
    lookback; up to and with ``last``. A window that somebody works on is left alone, and so is one
    that rests after it failed; one of another length than the settings' is not ours to train. With
    a recipe they are those that are done but not by that recipe, and hold what was never trained.
    """
    clock = clock or await read_clock(store)
    hours = hours or settings.windows.lookback_hours
    since = parse_bound(first) if first else clock.now - timedelta(hours=hours)
    until = parse_bound(last, last=True) if last else None
    return [window for window, _ in await _waiting(store, settings, clock, since, until)]


async def window_to_train(store: Store, settings: Settings, clock: Clock) -> Window:
    """When nobody names one: the oldest that is half-finished, else the newest that waits, else
    the last to close, which will say why.
    """
    since = clock.now - timedelta(hours=settings.windows.lookback_hours)
    waiting = await _waiting(store, settings, clock, since, None)
    half_finished = [window for window, state in waiting if state == WindowState.TRAINED]
    if half_finished:
        return half_finished[0]
    if waiting:
        return waiting[-1][0]
    settled = clock.now - timedelta(seconds=settings.windows.grace_s)
    return replace(
        last_complete_window(settled, settings.windows.minutes), recipe=settings.windows.recipe
    )


async def _waiting(
    store: Store, settings: Settings, clock: Clock, since: datetime, until: datetime | None
) -> list[tuple[Window, WindowState]]:
    reports = await window_reports(store, settings, since=since, until=until, clock=clock)
    ours = [report for report in reports if report.minutes == settings.windows.minutes]
    if settings.windows.recipe:
        return _for_recipe(ours, settings)
    return [
        (parse_window_id(report.window_id, report.minutes), report.state)
        for report in ours
        if report.ready or _half_finished(report)
    ]


def _half_finished(report: WindowReport) -> bool:
    return report.state == WindowState.TRAINED and not report.leased and not report.resting


def _for_recipe(
    reports: list[WindowReport], settings: Settings
) -> list[tuple[Window, WindowState]]:
    """Each window is taken up once; a skipped one had nothing to teach by this recipe either."""
    recipe = settings.windows.recipe
    known = {report.window_id: report for report in reports}
    waiting, over = [], DONE | {WindowState.SKIPPED}
    for report in reports:
        unused = report.trajectories - report.trained
        unused += report.late if settings.windows.include_late else 0
        if report.state not in DONE or "+" in report.window_id or not unused:
            continue
        window = parse_window_id(f"{report.window_id}+{recipe}", report.minutes)
        again = known.get(window.key)
        if again is None:
            waiting.append((window, WindowState.READY))
        elif again.state not in over and not again.leased and not again.resting:
            waiting.append((window, again.state))
    return waiting
