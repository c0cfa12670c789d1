"""``babylon judge``: the reasons for each agent's score in a window."""

from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, with_store
from babylon.core.errors import WindowError
from babylon.core.settings import load_settings

app = typer.Typer(help="Scores and reasons of the judge.", no_args_is_help=True)


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
    from babylon.cli.judge_page import print_details, print_group, read_scores

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


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
