"""Windows as ``babylon windows`` prints them.

The commands import this module when they run, because the stages are slow to load.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from babylon.cli.output import print_table, printable
from babylon.core.errors import WindowError
from babylon.core.settings import WindowSettings
from babylon.core.windows import DONE, FINISHED, Clock, parse_window_id
from babylon.quality.quality_page import reason_lines
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.freshness import stale_play
from babylon.stages.readiness import Page, WindowReport, window_reports
from babylon.store import Store
from babylon.store.attempts import Attempt, list_attempts
from babylon.store.connection import read_clock
from babylon.store.flow_state import newest_play
from babylon.store.late import LateRow, list_late, missed_rows
from babylon.store.learning import Learning, window_learning
from babylon.store.rejections import window_rejections
from babylon.store.windows import get_window

COLUMNS = ["window", "state", "age", "owner", "plays", "agents", "trained", "rejected", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHistory:
    """The part of ``windows show`` beside the report of a window."""

    late_trajectories: list[LateRow]
    attempts: list[Attempt]
    learning: list[Learning]


async def read_windows(
    store: Store,
    windows: WindowSettings,
    checked: CheckedRows,
    hours: int | None,
    *,
    page: Page | None = None,
    include_late: bool = False,
) -> tuple[list[WindowReport], list[LateRow], Clock, str]:
    """Return the windows of the last ``hours`` (``None``: all), their late rows, the clock, and an
    alarm if no play arrives."""
    clock = await read_clock(store)
    since = clock.now - timedelta(hours=hours) if hours else None
    reports = await window_reports(store, windows, checked, since=since, clock=clock, page=page)
    shown = {report.window_id for report in reports}
    late: list[LateRow] = []
    if include_late:
        late = [*await list_late(store), *await missed_rows(store)]
    stale = stale_play(await newest_play(store), windows, clock)
    return reports, [row for row in late if row.window_id in shown], clock, stale


async def read_window(
    store: Store, windows: WindowSettings, checked: CheckedRows, window_id: str
) -> tuple[WindowReport, WindowHistory]:
    """Return one window as ``read_windows`` does, with samples of its rejections, and its history.

    Raises:
        WindowError: nothing was recorded in the window, and nobody claimed it.
    """
    row = await get_window(store, window_id)
    minutes = row.minutes if row else windows.minutes
    window = parse_window_id(window_id, minutes)
    windows = windows.model_copy(update={"minutes": minutes})
    found = await window_reports(
        store,
        windows,
        checked,
        since=window.start,
        until=window.end,
        page=Page(only=window_id),
    )
    if not found:
        raise WindowError(
            f"nothing was recorded in window {window_id} and nobody ever claimed it: see"
            " `babylon windows list`"
        )
    (report,) = found
    if not all(rejection.samples for rejection in report.rejections):
        # The report of a finished window has counts only; the samples are in the database.
        report = replace(report, rejections=tuple(await window_rejections(store, window_id)))
    late = [
        *await list_late(store, window.id),
        *await missed_rows(store, window.start, window.end),
    ]
    return report, WindowHistory(
        late_trajectories=late,
        attempts=await list_attempts(store, [window_id]),
        learning=await window_learning(store, window_id),
    )


def waiting_with_rejections(reports: Sequence[WindowReport]) -> list[WindowReport]:
    """Return the windows that are not trained yet and have rejected trajectories."""
    return [r for r in reports if r.state not in FINISHED and r.rejections]


def left_behind(reports: Sequence[WindowReport], windows: WindowSettings) -> str:
    """Name the windows that are ready and too old for every schedule; empty if there are none.

    A hold, an outage or an experiment may have lasted longer than the lookback.
    """
    old = [
        report.window_id
        for report in reports
        if report.ready
        and report.minutes == windows.minutes
        and (report.age_s or 0.0) >= windows.lookback_hours * 3600
    ]
    if not old:
        return ""
    return (
        f"no schedule trains ready windows that ended over LOOKBACK_HOURS={windows.lookback_hours}"
        f" ago ({len(old)}): `babylon train --mode backfill --from {min(old)} --to {max(old)}`"
    )


def record(report: WindowReport) -> dict[str, object]:
    """Return a window for JSON, without the samples of its rejections."""
    fields = {**asdict(report), "rejected": report.rejected, "ready": report.ready}
    del fields["rejections"]
    return fields


def print_windows(reports: Sequence[WindowReport], explain: Sequence[WindowReport] = ()) -> None:
    """Print a table and notes; for the windows in ``explain`` also why rows were rejected."""
    if not reports:
        print("no window: `babylon agents spawn` lets agents play, `babylon db import` reads rows")
        return
    print_table("Windows", COLUMNS, [_row(report) for report in reports])
    print()
    for report in reports:
        if notes := "; ".join(_notes(report, explained=report in explain)):
            print(printable(f"{report.window_id}: {notes}"))
        if report in explain:
            for line in reason_lines(report.rejections):
                print(f"    {line}")


def print_window(report: WindowReport, history: WindowHistory) -> None:
    """Print one window with its attempts, its learning and its late trajectories."""
    print_windows([report], explain=[report])
    if fates := Counter(one.fate for one in history.learning):
        counts = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        print(f"trajectories: {counts}")
    if history.attempts:
        print()
        columns = ["epoch", "began", "from", "ended", "in", "end", "owner", "reason"]
        rows = [_attempt(one) for one in history.attempts]
        print_table("Attempts", columns, rows)
    if history.late_trajectories:
        print()
        print_late(history.late_trajectories)


def _attempt(one: Attempt) -> list[object]:
    return [
        one.epoch,
        f"{one.began_at:%m-%d %H:%M:%S}",
        one.began_from,
        one.ended_at and f"{one.ended_at:%m-%d %H:%M:%S}",
        one.ended_in,
        one.ending or "no end yet",
        one.owner.rpartition(":")[0],
        one.reason,
    ]


def print_late(late: Sequence[LateRow]) -> None:
    """Print a table of late trajectories."""
    if not late:
        print("no trajectory came late")
        return
    columns = ["window", "trajectory", "reason", "seen", "admitted to"]
    rows = [
        [
            row.window_id,
            row.trajectory_id,
            row.reason,
            row.seen_at and f"{row.seen_at:%Y-%m-%d %H:%M}",
            row.admitted_to,
        ]
        for row in late
    ]
    print_table("Late trajectories", columns, rows)


def _row(report: WindowReport) -> list[object]:
    return [
        report.window_id,
        report.state,
        None if report.age_s is None else _duration(report.age_s),
        report.owner and report.owner.rpartition(":")[0],  # host and process id
        report.trajectories,
        report.agents,
        report.trained,
        sum(report.rejected.values()),
        report.late,
    ]


def _duration(seconds: float) -> str:
    """Return the time since a window's end (``3 h``), or until it (``in 20 min``)."""
    amount = abs(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if amount >= 2 * length or unit == "min":
            text = f"{amount / length:.0f} {unit}"
            break
    return text if seconds >= 0 else f"in {text}"


def _notes(report: WindowReport, *, explained: bool) -> list[str]:
    """Return what a window lacks or how it failed, its rejections, and its unused rows."""
    notes = [] if report.state in DONE else list(report.missing)
    if report.reason and report.reason not in str(notes):
        notes.insert(0, report.reason)
    if report.ready:
        notes.append("can be trained now")
    unused = report.eligible - report.trained
    if report.state in FINISHED and unused > 0:
        notes.append(f"{unused} dropped out or without an advantage")
    notes += [f"ALARM {reason}" for reason in report.alarms]
    if report.outcomes == 0 and "+" not in report.window_id:
        notes.append(
            f"judged without market outcomes (see `judge again --window {report.window_id}`)"
        )
    if report.late:
        notes.append(f"{report.late} late (`train --recipe NAME --include-late` trains them)")
    if report.rejected:
        refused = ", ".join(f"{n} {reason}" for reason, n in report.rejected.items())
        notes.append(
            f"rejected {sum(report.rejected.values())}:" if explained else f"rejected {refused}"
        )
    return notes
