"""Windows as ``babylon windows`` prints them.

The commands import this module when they run, because the stages are slow to load.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta

from babylon.cli.output import print_table
from babylon.core.errors import WindowError
from babylon.core.settings import QualitySettings, WindowSettings
from babylon.core.windows import DONE, FINISHED, Clock, parse_window_id
from babylon.quality.quality_page import reason_lines
from babylon.stages.readiness import WindowReport, window_reports
from babylon.store import Store
from babylon.store.connection import read_clock
from babylon.store.late import LateRow, list_late
from babylon.store.rejections import window_rejections
from babylon.store.windows import get_window

COLUMNS = ["window", "state", "age", "owner", "plays", "agents", "trained", "rejected", "late"]


async def read_windows(
    store: Store,
    windows: WindowSettings,
    quality: QualitySettings,
    hours: int | None,
    *,
    include_late: bool = False,
) -> tuple[list[WindowReport], list[LateRow], Clock]:
    """Return the windows of the last ``hours`` (``None``: all), their late rows, and the clock."""
    clock = await read_clock(store)
    since = clock.now - timedelta(hours=hours) if hours else None
    reports = await window_reports(store, windows, quality, since=since, clock=clock)
    shown = {report.window_id for report in reports}
    late = await list_late(store) if include_late else []
    return reports, [row for row in late if row.window_id in shown], clock


async def read_window(
    store: Store, windows: WindowSettings, quality: QualitySettings, window_id: str
) -> tuple[WindowReport, list[LateRow]]:
    """Return one window, with samples of its rejections, and its late rows.

    Raises:
        WindowError: nothing was recorded in the window, and nobody claimed it.
    """
    row = await get_window(store, window_id)
    minutes = row.minutes if row else windows.minutes
    window = parse_window_id(window_id, minutes)
    windows = windows.model_copy(update={"minutes": minutes})
    reports = await window_reports(store, windows, quality, since=window.start, until=window.end)
    found = [report for report in reports if report.window_id == window_id]
    if not found:
        raise WindowError(
            f"nothing was recorded in window {window_id} and nobody ever claimed it: see"
            " `babylon windows list`"
        )
    (report,) = found
    if not all(rejection.samples for rejection in report.rejections):
        # The report of a finished window has counts only; the samples are in the database.
        report = replace(report, rejections=tuple(await window_rejections(store, window_id)))
    return report, await list_late(store, window.id)


def waiting_with_rejections(reports: Sequence[WindowReport]) -> list[WindowReport]:
    """Return the windows that are not trained yet and have rejected trajectories."""
    return [r for r in reports if r.state not in FINISHED and r.rejections]


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
            print(f"{report.window_id}: {notes}")
        if report in explain:
            for line in reason_lines(report.rejections):
                print(f"    {line}")


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
            f"{row.seen_at:%Y-%m-%d %H:%M}",
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
    if report.late:
        notes.append(f"{report.late} late (`train --recipe NAME --include-late` trains them)")
    if report.rejected:
        refused = ", ".join(f"{n} {reason}" for reason, n in report.rejected.items())
        notes.append(
            f"rejected {sum(report.rejected.values())}:" if explained else f"rejected {refused}"
        )
    return notes
