"""``babylon judge``: the reasons for each agent's score in a window, and the judge's cost."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer

from babylon.cli.options import Json, require_new_directory, well_formed_id
from babylon.cli.output import print_json, show_values, user_name, with_store
from babylon.core.errors import WindowError
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="Scores, reasons and cost of the judge.", no_args_is_help=True)
_window = partial(typer.Option, metavar="ID", callback=well_formed_id)


@app.command()
def explain(
    window: Annotated[str, _window(help="A window that was scored.")],
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
        str | None, _window(help="Show one window; default: all of the days.")
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=3660, metavar="N", help="UTC days; default: 7.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the judge's requests, tokens and US dollars by day and window."""
    from babylon.cli.judge_page import print_cost
    from babylon.store.judgments import spent_by_day

    if window and days:
        raise typer.BadParameter("--window shows all days of a window: leave --days out")
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since = None if window else midnight - timedelta(days=(days or 7) - 1)
    rows = with_store(load_settings(), spent_by_day, since, window)
    if json:
        total = {name: sum(getattr(row, name) for row in rows) for name in ("tokens", "usd")}
        print_json({"since": since, **total, "windows": [asdict(row) for row in rows]})
        return
    print_cost(rows)


@app.command()
def validity(json: Json = False) -> None:
    """Show how far each judge agrees with outcomes, by window and over its last windows, and its
    answers to canaries. People's answers to pairs follow."""
    from babylon.cli.judge_page import print_people, print_validity
    from babylon.scoring.judge.reported_validity import read_people, read_validity

    judges = with_store(load_settings(), read_validity)
    people = with_store(load_settings(), read_people)
    if json:
        judged = [asdict(judge) for judge in judges]
        print_json({"judges": judged, "people": [asdict(one) for one in people]})
        return
    print_validity(judges)
    print_people(people)


@app.command()
def pairs(
    window: Annotated[str | None, _window(help="A judged window; default: the newest.")] = None,
    person: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who judges; default: the user's name.")
    ] = None,
    json: Json = False,
) -> None:
    """Judge pairs of plays yourself. Your answers count like a judge's when a window is judged with
    a panel. --json prints the next pair and asks nothing."""
    from babylon.cli.judge_page import ask_pair
    from babylon.ops.pages.pairs import answer_pair, read_pair

    settings, name, answered = load_settings(), person or user_name(), 0
    while (pair := with_store(settings, read_pair, name, window)) is not None:
        if json:
            print_json({"person": name, **asdict(pair)})
            return
        answer = ask_pair(pair)
        if answer is None:
            break
        first, second = (play.trajectory_id for play in pair.plays)
        better, because = (first, second)[answer[0]], answer[1]
        with_store(settings, answer_pair, name, pair.window_id, first, second, better, because)
        answered += 1
    if json:
        print_json({"person": name, "plays": []})
        return
    print(f"{answered} answers stored" + ("" if pair else ", and no pair is left"))


@app.command()
def train(
    target: Annotated[Path, typer.Argument(help="New directory of the checkpoint.")],
    later: Annotated[
        float, typer.Option(min=0.05, max=0.9, help="Share of the windows that test the judge.")
    ] = 0.3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes of SFT.")] = 6,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of GRPO after SFT.")] = 2,
    tuning: Annotated[
        Literal["full", "lora"], typer.Option(help="Weights that are trained.")
    ] = "full",
    json: Json = False,
) -> None:
    """Train the base model as a judge on scored windows, and compare it on the later ones. The
    result can be JUDGE_MODEL_PATH, or a member of JUDGE_PANEL."""
    from babylon.cli.judge_page import print_training
    from babylon.cli.output import stderr
    from babylon.stages.train_judge import JudgeTraining
    from babylon.stages.train_judge_windows import train_own_judge

    require_new_directory(target)  # before minutes of training
    settings = load_settings()
    options = JudgeTraining(
        later=later, epochs=epochs, rounds=rounds, tuning=tuning, seed=settings.seed
    )
    trained = with_store(
        settings,
        train_own_judge,
        settings.home,
        settings.model,
        settings.judge,
        settings.training,
        target,
        options,
        stderr.print,
    )
    if json:
        print_json(asdict(trained))
        return
    print_training(trained)


@app.command()
def again(
    window: Annotated[str, _window(help="A window that is done.")],
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
