"""``babylon judge``: the reasons for each agent's score in a window, and the judge's cost."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, show_values, with_store
from babylon.core.errors import WindowError
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="Scores, reasons and cost of the judge.", no_args_is_help=True)


@app.command()
def explain(
    window: Annotated[str, typer.Option(metavar="ID", help="A window that was scored.")],
    agent: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show one agent: all its reasons, and what the judge saw."),
    ] = None,
    json: Json = False,
) -> None:
    """Show each agent's score, interval and first reason, and the best and worst of each group."""
    from babylon.cli.judge_page import print_cost, print_details, print_group, read_scores
    from babylon.store.judgments import spent_by_day

    metrics, scores = with_store(load_settings(), read_scores, window)
    shown = [score for score in scores if agent is None or score.agent_id == agent]
    if not shown:
        raise WindowError(
            f"window {window} has no score"
            + (
                f" of agent {agent!r}: leave out --agent to see all agents"
                if scores
                else ": train it first, or see `babylon windows list`"
            )
        )
    # All scores: best and worst are those of the whole group, also if one agent is shown.
    groups = [(name, list(group)) for name, group in groupby(scores, lambda s: s.scenario_id)]
    if json:
        records = [
            {
                "scenario": name,
                "best": group[0].agent_id,
                "worst": group[-1].agent_id,
                "agents": [asdict(score) for score in group if score in shown],
            }
            for name, group in groups
        ]
        print_json({"window": window, "judge": metrics, "groups": records})
        return
    about = ", ".join(f"{name} {_plain(metrics[name])}" for name in sorted(metrics))
    print(f"window {window}, scorer {scores[0].scorer}" + (f": {about}" if about else ""))
    for name, group in groups:
        if members := [score for score in group if score in shown]:
            print_group(name, group, members)
    if agent is not None:
        for score in shown:
            print_details(score)
    elif paid := with_store(load_settings(), spent_by_day, None, window):
        print_cost(paid)


@app.command()
def cost(
    window: Annotated[
        str | None, typer.Option(metavar="ID", help="Show one window; default: all of the days.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, metavar="N", help="UTC days.")] = 7,
    json: Json = False,
) -> None:
    """Show the judge's requests, tokens and US dollars by day and window."""
    from babylon.cli.judge_page import print_cost
    from babylon.store.judgments import spent_by_day

    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since = None if window else midnight - timedelta(days=days - 1)
    rows = with_store(load_settings(), spent_by_day, since, window)
    if json:
        total = {name: sum(getattr(row, name) for row in rows) for name in ("tokens", "usd")}
        print_json({"since": since, **total, "windows": [asdict(row) for row in rows]})
        return
    print_cost(rows)


@app.command()
def validity(json: Json = False) -> None:
    """Show how far each judge agrees with outcomes, by window and over its last windows."""
    from babylon.cli.judge_page import print_validity
    from babylon.scoring.judge.reported_validity import read_validity

    judges = with_store(load_settings(), read_validity)
    if json:
        print_json({"judges": [asdict(judge) for judge in judges]})
        return
    print_validity(judges)


@app.command()
def again(
    window: Annotated[str, typer.Option(metavar="ID", help="A window that is done.")],
    json: Json = False,
) -> None:
    """Judge a finished window again, with market outcomes that came late. Nothing is trained: the
    new scores are stored as window ID+judged-again."""
    from babylon.stages.judge_again import judge_again
    from babylon.stages.score import score_window

    settings = load_settings()
    judged = with_store(
        settings,
        judge_again,
        settings.home,
        settings.windows,
        settings.quality,
        window,
        partial(score_window, settings=settings),
    )
    show_values(asdict(judged), json)


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
