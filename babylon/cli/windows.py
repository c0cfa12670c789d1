"""``babylon windows``: the recorded windows, their states, and what each lacks for training."""

from dataclasses import asdict
from typing import Annotated

import typer

from babylon.cli.options import Json, MinActions, MinAgents, WindowMinutes, given
from babylon.cli.output import print_json, with_store
from babylon.core.settings import MAX_HOURS, Settings, load_settings

app = typer.Typer(help="Recorded windows and whether they can be trained.", no_args_is_help=True)
Lookback = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Only the last H hours. Default: all."),
]
EXPLAINED = 3  # ``check`` explains the rejections of the newest windows


@app.command("list")
def list_(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    include_late: Annotated[
        bool, typer.Option("--include-late", help="List each late trajectory too.")
    ] = False,
    json: Json = False,
) -> None:
    """List every window: its state, owner, counts, and the reason for its state."""
    from babylon.cli.windows_page import print_late, print_windows, read_windows, record

    settings = _settings(min_agents, min_actions, window_minutes)
    reports, late, _ = with_store(
        settings,
        read_windows,
        settings.windows,
        settings.quality,
        lookback_hours,
        include_late=include_late,
    )
    if json:
        windows = [record(report) for report in reports]
        print_json({"windows": windows, "late": late} if include_late else {"windows": windows})
        return
    print_windows(reports)
    if include_late:
        print_late(late)


@app.command()
def check(
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    window_minutes: WindowMinutes = None,
    lookback_hours: Lookback = None,
    json: Json = False,
) -> None:
    """Print READY FOR TRAINING, or what is missing. The exit code is 1 if no window is ready."""
    from babylon.cli.windows_page import print_windows, read_windows, waiting_with_rejections

    settings = _settings(min_agents, min_actions, window_minutes)
    reports, _, clock = with_store(
        settings, read_windows, settings.windows, settings.quality, lookback_hours
    )
    ready = [report.window_id for report in reports if report.ready]
    refusing = waiting_with_rejections(reports)
    if json:
        print_json(
            {
                "ready": bool(ready),
                "windows": ready,
                "missing": {r.window_id: r.missing for r in reports if not r.ready},
                "late": {r.window_id: r.late for r in reports if r.late},
                "rejected": {r.window_id: [asdict(one) for one in r.rejections] for r in refusing},
                "hidden_sessions": clock.hidden,
            }
        )
    else:
        print_windows(reports, explain=refusing[-EXPLAINED:])
        if clock.hidden:
            print(_hidden_sessions(clock.hidden, settings.windows.grace_s))
        print(_conclusion(ready, settings.windows.min_agents, lookback_hours))
    raise typer.Exit(0 if ready else 1)


@app.command()
def show(
    window: Annotated[str, typer.Argument(metavar="ID", help="See `babylon windows list`.")],
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    json: Json = False,
) -> None:
    """Show one window: what it lacks, its rejected trajectories with reasons, and its late ones."""
    from babylon.cli.windows_page import print_late, print_windows, read_window, record

    settings = _settings(min_agents, min_actions)
    report, late = with_store(settings, read_window, settings.windows, settings.quality, window)
    if json:
        rejections = [asdict(one) for one in report.rejections]
        print_json({**record(report), "rejections": rejections, "late_trajectories": late})
        return
    print_windows([report], explain=[report])
    if late:
        print()
        print_late(late)


def _settings(agents: int | None, actions: int | None, minutes: int | None = None) -> Settings:
    windows = {"min_agents": agents, "minutes": minutes}
    return load_settings(**given(windows=windows, quality={"min_actions": actions}))


def _hidden_sessions(sessions: int, grace_s: float) -> str:
    return (
        f"{sessions} sessions of other accounts hide the start of their transactions: rows that"
        f" they commit later than WINDOW_GRACE_SECONDS={grace_s:g} after a window are"
        " late, unless you GRANT pg_read_all_stats to this account"
    )


def _conclusion(ready: list[str], min_agents: int, hours: int | None) -> str:
    if ready:
        return f"READY FOR TRAINING: {', '.join(ready[-3:])}" + (
            f" and {len(ready) - 3} older" if len(ready) > 3 else ""
        )
    where = "recorded window" if hours is None else f"window of the last {hours} h"
    return f"NOT READY: no {where} waits with {min_agents} eligible agents"
