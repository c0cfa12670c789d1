"""``babylon windows``: what was recorded, and what could be trained."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from babylon.cli.options import Json, MinActions, MinAgents, WindowMinutes, given
from babylon.cli.output import print_json, print_table
from babylon.settings import MAX_HOURS, Settings, load_settings
from babylon.windows import DONE, WindowState

if TYPE_CHECKING:
    from babylon.readiness import WindowReport

app = typer.Typer(help="Recorded windows and whether they can be trained.", no_args_is_help=True)
Lookback = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Only the last H hours; default: all."),
]


@app.command("list")
def list_(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    json: Json = False,
) -> None:
    """Every window: its state, eligible agents, and why trajectories were rejected."""
    options = given(min_agents=min_agents, min_actions=min_actions, window_minutes=window_minutes)
    settings = load_settings(**options)
    reports = asyncio.run(_reports(settings, lookback_hours))
    if json:
        print_json({"windows": [_record(report) for report in reports]})
    else:
        _print(reports)


@app.command()
def check(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    json: Json = False,
) -> None:
    """Say READY FOR TRAINING, or what is missing; exit code 1 when no window is ready."""
    options = given(min_agents=min_agents, min_actions=min_actions, window_minutes=window_minutes)
    settings = load_settings(**options)
    reports = asyncio.run(_reports(settings, lookback_hours))
    ready = [report.window_id for report in reports if report.ready]
    if json:
        missing = {r.window_id: r.missing for r in reports if not r.ready}
        print_json({"ready": bool(ready), "windows": ready, "missing": missing})
    else:
        _print(reports)
        print(_conclusion(ready, settings, lookback_hours))
    raise typer.Exit(0 if ready else 1)


def _conclusion(ready: list[str], settings: Settings, hours: int | None) -> str:
    if ready:
        return f"READY FOR TRAINING: {', '.join(ready[-3:])}" + (
            f" and {len(ready) - 3} older" if len(ready) > 3 else ""
        )
    where = "recorded" if hours is None else f"of the last {hours} h"
    return f"NOT READY: no window {where} waits with {settings.min_agents} eligible agents"


async def _reports(settings: Settings, hours: int | None) -> "list[WindowReport]":
    from babylon.readiness import window_reports
    from babylon.store import open_store

    async with open_store(settings) as store:
        return await window_reports(store, settings, lookback_hours=hours)


def _record(report: "WindowReport") -> dict[str, object]:
    return {**asdict(report), "ready": report.ready}


def _print(reports: "list[WindowReport]") -> None:
    columns = ["window", "state", "agents", "eligible", "trained", "rejected"]
    rows = [
        [
            report.window_id,
            report.state,
            len(report.agents),
            report.eligible,
            report.trained,
            "\n".join(f"{n} {reason}" for reason, n in report.rejected.items()),
        ]
        for report in reports
    ]
    if not reports:
        print("no window: `babylon agents spawn` lets agents play, `babylon db import` reads rows")
        return
    print_table("Windows", columns, rows)
    for report in reports:
        if notes := _notes(report):
            print(f"{report.window_id}: {notes}")


def _notes(report: "WindowReport") -> str:
    """What a window that is done leaves unused; what another lacks, or how it failed."""
    if report.state in DONE:
        left = f"{report.eligible} eligible trajectories stay untrained"
        return f"{left}: late, thinned out, or without a lesson" if report.eligible else ""
    failure = report.reason if report.state == WindowState.FAILED else None
    return "; ".join(report.missing) or failure or ""
