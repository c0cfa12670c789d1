"""The windows that can be trained now."""

import logging
from dataclasses import replace
from datetime import datetime, timedelta

from babylon.core.errors import WindowError, WindowNotReadyError
from babylon.core.settings import QualitySettings, WindowSettings
from babylon.core.windows import (
    DONE,
    JUDGED_AGAIN,
    Clock,
    Window,
    WindowState,
    check_settled,
    last_complete_window,
    parse_bound,
    parse_window_id,
    window_at,
)
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.readiness import WindowReport, window_reports
from babylon.store import Store
from babylon.store.connection import read_clock, require_game_tables
from babylon.store.holds import running_hold
from babylon.store.late import note_late
from babylon.store.play_in_use import IN_TIME
from babylon.store.windows import get_window

log = logging.getLogger("babylon.flows")
_PLAYED = f"SELECT EXISTS (SELECT FROM trajectories WHERE {IN_TIME})"


async def pending_windows(
    store: Store,
    windows: WindowSettings,
    quality: QualitySettings,
    *,
    hours: float | None = None,
    first: str | None = None,
    last: str | None = None,
    clock: Clock | None = None,
) -> list[Window]:
    """Return the half-finished windows, then those that are ready, each oldest first.

    The range starts at ``first`` (a date or window id), else ``hours`` ago (default: the lookback
    of the settings), and includes ``last``. Left out are windows that another run holds, windows
    that rest after a failure, and windows of another length than the settings'. With a recipe, the
    range is searched for windows that are done, not yet by this recipe, and hold untrained rows.
    While training is on hold, nothing is returned.
    """
    if holding := await running_hold(store):
        log.warning("no window is chosen: %s", holding)
        return []
    clock = clock or await read_clock(store)
    hours = hours or windows.lookback_hours
    since = parse_bound(first) if first else clock.now - timedelta(hours=hours)
    until = parse_bound(last, last=True) if last else None
    waiting = await _waiting(store, windows, quality, clock, since, until)
    waiting.sort(key=lambda one: one[1] != WindowState.TRAINED)  # stable
    return [window for window, _ in waiting]


async def window_to_train(
    store: Store,
    windows: WindowSettings,
    quality: QualitySettings,
    window_id: str | None = None,
    *,
    clock: Clock | None = None,
) -> Window:
    """Return the window of that id, or choose one.

    The choice is the oldest half-finished window, else the newest that is ready, else the last one
    that closed: its training then fails with the reason.

    Raises:
        WindowError: the id is not a window's, or names one that is only judged again, or one that
            nobody played or claimed.
        WindowNotReadyError: rows of the named window may still arrive, or training is on hold and
            none is named.
    """
    clock = clock or await read_clock(store)
    if window_id is not None:
        window = parse_window_id(window_id, windows.minutes)
        check_settled(window, clock, windows.grace_s)
        window = replace(window, recipe=_checked(window.recipe or windows.recipe))
        await _check_played(store, window)
        return window
    if holding := await running_hold(store):
        raise WindowNotReadyError(f"{holding}; a window that you name is trained all the same")
    since = clock.now - timedelta(hours=windows.lookback_hours)
    waiting = await _waiting(store, windows, quality, clock, since, None)
    half_finished = [window for window, state in waiting if state == WindowState.TRAINED]
    if half_finished:  # its update is paid for: only validation and deployment are missing
        return half_finished[0]
    if waiting:
        return waiting[-1][0]
    settled = clock.now - timedelta(seconds=windows.grace_s)
    window = last_complete_window(settled, windows.minutes)
    return replace(window, recipe=windows.recipe)


async def _waiting(
    store: Store,
    windows: WindowSettings,
    quality: QualitySettings,
    clock: Clock,
    since: datetime,
    until: datetime | None,
) -> list[tuple[Window, WindowState]]:
    _checked(windows.recipe)
    await note_late(store, window_at(since, windows.minutes).start, until)
    checked = CheckedRows(quality, store.home)
    reports = await window_reports(store, windows, checked, since=since, until=until, clock=clock)
    ours = [report for report in reports if report.minutes == windows.minutes]
    if windows.recipe:
        return _for_recipe(ours, windows)
    return [
        (parse_window_id(report.window_id, report.minutes), report.state)
        for report in ours
        if report.ready or _is_half_finished(report)
    ]


async def _check_played(store: Store, window: Window) -> None:
    """Refuse a mistyped window: its claim would leave a row, and news of a skipped window."""
    if await get_window(store, window.id) is not None:
        return
    require_game_tables(store)
    if not await store.game.fetchval(_PLAYED, window.start, window.end):
        raise WindowError(
            f"window {window.id} has no play: nothing that is recorded began in it;"
            " `babylon windows list` names the windows that have some"
        )


def _checked(recipe: str) -> str:
    if recipe == JUDGED_AGAIN:
        raise WindowError(
            f"recipe {recipe}: it names the windows that `babylon judge again` scored, and nothing"
            " of them is trained: give the recipe another name"
        )
    return recipe


def _is_half_finished(report: WindowReport) -> bool:
    return report.state == WindowState.TRAINED and not report.leased and not report.resting


def _for_recipe(
    reports: list[WindowReport], windows: WindowSettings
) -> list[tuple[Window, WindowState]]:
    """A recipe trains each window once. A window that it skipped is not tried again either."""
    recipe = windows.recipe
    known = {report.window_id: report for report in reports}
    waiting, over = [], DONE | {WindowState.SKIPPED}
    for report in reports:
        unused = report.trajectories - report.trained
        unused += report.late if windows.include_late else 0
        if report.state not in DONE or "+" in report.window_id or not unused:
            continue
        window = parse_window_id(f"{report.window_id}+{recipe}", report.minutes)
        again = known.get(window.key)
        if again is None:
            waiting.append((window, WindowState.READY))
        elif again.state not in over and not again.leased and not again.resting:
            waiting.append((window, again.state))
    return waiting
