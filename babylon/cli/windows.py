"""``babylon windows``: what was recorded, where each window is, and what could be trained."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from babylon.cli.options import Json, MinActions, MinAgents, WindowMinutes, given
from babylon.cli.output import print_json, print_table
from babylon.core.errors import WindowError
from babylon.core.settings import MAX_HOURS, Settings, load_settings
from babylon.core.windows import DONE, FINISHED, Clock, parse_window_id

if TYPE_CHECKING:
    from babylon.stages.readiness import WindowReport
    from babylon.store.late import LateRow
    from babylon.store.rejections import RejectedFor

app = typer.Typer(help="Recorded windows and whether they can be trained.", no_args_is_help=True)
Lookback = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Only the last H hours; default: all."),
]
EXPLAINED = 3  # windows whose rejections ``check`` explains, the newest
COLUMNS = ("window", "state", "age", "owner", "plays", "agents", "trained", "rejected", "late")


@app.command("list")
def list_(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    include_late: Annotated[
        bool, typer.Option("--include-late", help="Name each late trajectory.")
    ] = False,
    json: Json = False,
) -> None:
    """Every window: its state, who works on it, what was played, and why it is where it is."""
    options = given(
        windows={"min_agents": min_agents, "minutes": window_minutes},
        quality={"min_actions": min_actions},
    )
    settings = load_settings(**options)
    reports, late, _ = asyncio.run(_look(settings, lookback_hours, include_late))
    if json:
        told = {"windows": [_record(report) for report in reports]}
        print_json({**told, "late": late} if include_late else told)
        return
    _print(reports)
    if include_late:
        _print_late(late)


@app.command()
def check(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    json: Json = False,
) -> None:
    """Say READY FOR TRAINING, or what is missing; exit code 1 when no window is ready."""
    options = given(
        windows={"min_agents": min_agents, "minutes": window_minutes},
        quality={"min_actions": min_actions},
    )
    settings = load_settings(**options)
    reports, _, clock = asyncio.run(_look(settings, lookback_hours))
    ready = [report.window_id for report in reports if report.ready]
    if json:
        missing = {r.window_id: r.missing for r in reports if not r.ready}
        late = {r.window_id: r.late for r in reports if r.late}
        rejected = {r.window_id: _rejections(r.rejections) for r in _refusing(reports)}
        told = {"ready": bool(ready), "windows": ready, "missing": missing, "late": late}
        print_json({**told, "rejected": rejected, "hidden_sessions": clock.hidden})
    else:
        _print(reports, explain=_refusing(reports)[-EXPLAINED:])
        if clock.hidden:
            print(_blind(clock.hidden, settings))
        print(_conclusion(ready, settings, lookback_hours))
    raise typer.Exit(0 if ready else 1)


@app.command()
def show(
    window: Annotated[str, typer.Argument(metavar="ID", help="As `windows list` names it.")],
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    json: Json = False,
) -> None:
    """One window: what it lacks, which trajectories were refused and why, which came late."""
    settings = load_settings(
        **given(windows={"min_agents": min_agents}, quality={"min_actions": min_actions})
    )
    report, late = asyncio.run(_look_at(settings, window))
    if json:
        told = {"rejections": _rejections(report.rejections), "late_trajectories": late}
        print_json({**_record(report), **told})
        return
    _print([report], explain=[report])
    if late:
        print()
        _print_late(late)


def _blind(sessions: int, settings: Settings) -> str:
    """Where the game's database is somebody else's, and shows us little of what goes on in it."""
    return (
        f"{sessions} sessions of other accounts hide when their transactions began: only the grace"
        f" (WINDOW_GRACE_SECONDS={settings.windows.grace_s:g}) waits for what they commit late,"
        " unless you GRANT pg_read_all_stats to this account"
    )


def _conclusion(ready: list[str], settings: Settings, hours: int | None) -> str:
    if ready:
        return f"READY FOR TRAINING: {', '.join(ready[-3:])}" + (
            f" and {len(ready) - 3} older" if len(ready) > 3 else ""
        )
    where = "recorded" if hours is None else f"of the last {hours} h"
    return f"NOT READY: no window {where} waits with {settings.windows.min_agents} eligible agents"


async def _look(
    settings: Settings, hours: int | None, include_late: bool = False
) -> "tuple[list[WindowReport], list[LateRow], Clock]":
    from babylon.stages.readiness import window_reports
    from babylon.store import open_store
    from babylon.store.database_clock import read_clock
    from babylon.store.late import list_late

    async with open_store(settings) as store:
        clock = await read_clock(store)
        since = clock.now - timedelta(hours=hours) if hours else None
        reports = await window_reports(store, settings, since=since, clock=clock)
        shown = {report.window_id for report in reports}
        late = await list_late(store) if include_late else []
        return reports, [row for row in late if row.window_id in shown], clock


async def _look_at(settings: Settings, window_id: str) -> "tuple[WindowReport, list[LateRow]]":
    from babylon.stages.readiness import window_reports
    from babylon.store import open_store
    from babylon.store.late import list_late
    from babylon.store.rejections import window_rejections
    from babylon.store.windows import get_window

    async with open_store(settings) as store:
        row = await get_window(store, window_id)
        minutes = row.minutes if row else settings.windows.minutes
        window = parse_window_id(window_id, minutes)
        settings = settings.replace(windows={"minutes": minutes})
        reports = await window_reports(store, settings, since=window.start, until=window.end)
        found = [report for report in reports if report.window_id == window_id]
        if not found:
            raise WindowError(
                f"nothing was recorded in window {window_id} and nobody ever claimed it: see"
                " `babylon windows list`"
            )
        (report,) = found
        if not all(rejection.samples for rejection in report.rejections):  # of a run that is over
            stored = await window_rejections(store, window_id)
            report = replace(report, rejections=tuple(stored))
        return report, await list_late(store, window.id)


def _record(report: "WindowReport") -> dict[str, object]:
    record = {**asdict(report), "rejected": report.rejected, "ready": report.ready}
    del record["rejections"]  # samples: ``check`` and ``show`` have them
    return record


def _rejections(rejections: "Sequence[RejectedFor]") -> list[dict[str, Any]]:
    return [asdict(rejection) for rejection in rejections]


def _refusing(reports: "list[WindowReport]") -> "list[WindowReport]":
    """Windows that wait, and rows of which were refused."""
    return [r for r in reports if r.state not in FINISHED and r.rejections]


def _print(reports: "list[WindowReport]", explain: "Sequence[WindowReport]" = ()) -> None:
    if not reports:
        print("no window: `babylon agents spawn` lets agents play, `babylon db import` reads rows")
        return
    from babylon.quality.quality_page import reason_lines

    print_table("Windows", list(COLUMNS), [_row(report) for report in reports])
    print()
    for report in reports:
        if notes := "; ".join(_notes(report, explained=report in explain)):
            print(f"{report.window_id}: {notes}")
        if report in explain:
            for line in reason_lines(report.rejections):
                print(f"    {line}")


def _row(report: "WindowReport") -> list[Any]:
    return [
        report.window_id,
        report.state,
        None if report.age_s is None else _duration(report.age_s),
        report.owner and report.owner.rpartition(":")[0],  # host and process, without the rest
        report.trajectories,
        report.agents,
        report.trained,
        sum(report.rejected.values()),
        report.late,
    ]


def _duration(seconds: float) -> str:
    """Since a window's end; ``in 20 min`` before it."""
    amount = abs(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if amount >= 2 * length or unit == "min":
            text = f"{amount / length:.0f} {unit}"
            break
    return text if seconds >= 0 else f"in {text}"


def _notes(report: "WindowReport", *, explained: bool) -> list[str]:
    """What a window lacks or how it failed, why rows were refused, and what is left unused."""
    notes = [] if report.state in DONE else list(report.missing)
    if report.reason and report.reason not in str(notes):
        notes.insert(0, report.reason)
    if report.ready:
        notes.append("can be trained now")
    unused = report.eligible - report.trained
    if report.state in FINISHED and unused > 0:
        notes.append(f"{unused} thinned out or without a lesson")
    if report.late:
        notes.append(f"{report.late} late (train --recipe NAME --include-late takes them up)")
    if report.rejected:
        refused = ", ".join(f"{n} {reason}" for reason, n in report.rejected.items())
        notes.append(
            f"rejected {sum(report.rejected.values())}:" if explained else f"rejected {refused}"
        )
    return notes


def _print_late(late: "list[LateRow]") -> None:
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
