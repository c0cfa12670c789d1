"""``babylon windows``: the recorded windows, their states, and what each lacks for training."""

from dataclasses import asdict
from typing import Annotated

import typer

from babylon.cli.options import (
    Json,
    MinActions,
    MinAgents,
    NamedWindow,
    NeededReason,
    WindowMinutes,
    given,
)
from babylon.cli.output import print_json, show_values, user_name, with_store
from babylon.core.errors import WindowError
from babylon.core.settings import MAX_HOURS, Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_bound

app = typer.Typer(help="Recorded windows and whether they can be trained.", no_args_is_help=True)
Lookback = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Only the last H hours. Default: all."),
]
WINDOWS_A_PAGE = 200
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
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Show the newest N windows.")
    ] = WINDOWS_A_PAGE,
    before: Annotated[
        str | None, typer.Option(metavar="ID", help="Show the windows before this one.")
    ] = None,
    json: Json = False,
) -> None:
    """List windows: state, owner, counts, and the reason for the state. Nothing is written."""
    from babylon.cli.windows_page import (
        left_behind,
        print_late,
        print_windows,
        read_windows,
        record,
    )
    from babylon.stages.checked_rows import CheckedRows
    from babylon.stages.readiness import Page
    from babylon.store.holds import running_hold

    if before is not None:
        parse_bound(before.partition("+")[0])  # any other text would be compared as text
    settings = _settings(min_agents, min_actions, window_minutes)
    reports, late, _, stale = with_store(
        settings,
        read_windows,
        settings.windows,
        CheckedRows(settings.quality, settings.home),
        lookback_hours,
        page=Page(limit=limit + 1, before=before),
        include_late=include_late,
    )
    holding = with_store(settings, running_hold)
    # One window more than a page was read, to see if there are older ones.
    older = reports[-limit].window_id if len(reports) > limit else None
    reports = reports[-limit:]
    if json:
        page: dict[str, object] = {"windows": [record(report) for report in reports]}
        page |= {"older_before": older, "stale": stale}
        page["hold"] = asdict(holding) if holding else None
        print_json({**page, "late": late} if include_late else page)
        return
    print_windows(reports)
    if old := left_behind(reports, settings.windows):
        print(old)
    if holding:
        print(holding)
    if older:
        print(f"older windows: babylon windows list --before {older}")
    if stale:
        print(f"ALARM {stale}")
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
    from babylon.cli.windows_page import (
        left_behind,
        print_windows,
        read_windows,
        waiting_with_rejections,
    )
    from babylon.stages.checked_rows import CheckedRows

    settings = _settings(min_agents, min_actions, window_minutes)
    checked = CheckedRows(settings.quality, settings.home)
    reports, _, clock, stale = with_store(
        settings, read_windows, settings.windows, checked, lookback_hours
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
                "stale": stale,
            }
        )
    else:
        print_windows(reports, explain=refusing[-EXPLAINED:])
        if stale:
            print(f"ALARM {stale}")
        if clock.hidden:
            print(_hidden_sessions(clock.hidden, settings.windows.grace_s))
        if old := left_behind(reports, settings.windows):
            print(old)
        print(_conclusion(ready, settings.windows.min_agents, lookback_hours))
    raise typer.Exit(0 if ready else 1)


@app.command()
def show(
    window: NamedWindow,
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    json: Json = False,
) -> None:
    """Show one window: what it lacks, its attempts, rejected and late rows, and its learning."""
    from babylon.cli.judge_page import print_cost
    from babylon.cli.windows_page import print_window, read_window, record
    from babylon.stages.checked_rows import CheckedRows
    from babylon.store.judgments import spent_by_day

    settings = _settings(min_agents, min_actions)
    checked = CheckedRows(settings.quality, settings.home)
    report, history = with_store(settings, read_window, settings.windows, checked, window)
    paid = with_store(settings, spent_by_day, None, window)
    if json:
        rejections, cost = [asdict(one) for one in report.rejections], [asdict(one) for one in paid]
        lists = {"rejections": rejections, "judge_cost": cost}
        print_json({**record(report), **lists, **asdict(history)})
        return
    print_window(report, history)
    if paid:
        print()
        print_cost(paid)


@app.command()
def release(
    window: NamedWindow,
    reason: NeededReason = "released by hand",
    json: Json = False,
) -> None:
    """Free the play of a rejected or rolled-back window, so that a recipe can train it again."""
    from babylon.store.releases import release_window

    settings = load_settings()
    freed = with_store(settings, release_window, window, user_name(), reason)
    if json:
        print_json({"window_id": window, "released": freed})
        return
    print(
        f"{freed} trajectories of window {window} are free: `babylon train --window"
        f" {window.partition('+')[0]}"
        " --recipe NAME` trains them from the present champion"
    )


@app.command()
def explain(
    window: NamedWindow,
    json: Json = False,
) -> None:
    """Tell the story of a window: who played, what was rejected and why, update, verdict, route."""
    from babylon.ops.pages.window_facts import read_window_facts
    from babylon.ops.pages.window_page import window_markdown

    facts = with_store(load_settings(), read_window_facts, window)
    if facts is None:
        raise WindowError(
            f"nobody ever claimed window {window}: `babylon windows show {window}` says what it"
            " lacks"
        )
    lines = window_markdown(facts).splitlines()
    page = "\n".join(line for line in lines if not line.startswith("!["))
    print_json({"window_id": window, "page": page}) if json else print(page)


@app.command()
def retry(
    window: NamedWindow,
    json: Json = False,
) -> None:
    """Try a failed or skipped window again in the next run."""
    from babylon.store.by_hand import named_window, retry_window

    settings = load_settings()
    named = with_store(settings, named_window, window, settings.windows.minutes)
    with_store(settings, retry_window, named, user_name())
    done = "the next run may train it; `babylon train --window` does now"
    show_values({"window_id": window, "retry": done}, json)


@app.command()
def skip(
    window: NamedWindow,
    reason: NeededReason,
    json: Json = False,
) -> None:
    """Leave a window alone: no run chooses it by itself."""
    from babylon.store.by_hand import named_window, skip_window

    settings = load_settings()
    named = with_store(settings, named_window, window, settings.windows.minutes)
    with_store(settings, skip_window, named, user_name(), reason)
    show_values({"window_id": window, "skipped": reason}, json)


@app.command()
def hold(
    reason: NeededReason,
    json: Json = False,
) -> None:
    """Let schedules and loops begin no window. A run that has begun finishes its window."""
    from babylon.store.holds import hold

    show_values({"hold": str(with_store(load_settings(), hold, user_name(), reason))}, json)


@app.command()
def resume(json: Json = False) -> None:
    """End the hold."""
    from babylon.store.holds import end_hold

    settings = load_settings()
    ended = with_store(settings, end_hold, user_name())
    goes_on = (
        f"training goes on with the windows of the last {settings.windows.lookback_hours} h;"
        " `babylon windows check` names older ones that are ready"
    )
    show_values({"resumed": goes_on if ended else "there was no hold"}, json)


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
