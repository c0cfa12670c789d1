"""``babylon judge``: why each agent of a window has the score it has."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.core.errors import WindowError
from babylon.core.settings import load_settings

if TYPE_CHECKING:
    from babylon.store.scores import Scored

app = typer.Typer(help="What the judge said, and why.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``explain`` a command of its own while it is the only one."""


@app.command()
def explain(
    window: Annotated[str, typer.Option(metavar="ID", help="A window that was scored.")],
    agent: Annotated[
        str | None, typer.Option(metavar="A", help="One agent: all reasons, and what was seen.")
    ] = None,
    json: Json = False,
) -> None:
    """Score, interval and reasons of each agent, the best and the worst; what the judge saw."""
    metrics, scores = asyncio.run(_read(window))
    shown = [score for score in scores if agent is None or score.agent_id == agent]
    if not shown:
        raise WindowError(
            f"window {window} has no score"
            + (
                f" of agent {agent!r}: leave out --agent to see who has"
                if scores
                else ": train it first, or see `babylon windows list`"
            )
        )
    groups = [(name, list(group)) for name, group in groupby(scores, lambda s: s.scenario_id)]
    if json:
        print_json(
            {
                "window": window,
                "judge": metrics,
                "groups": [_group_record(name, group, shown) for name, group in groups],
            }
        )
        return
    told = ", ".join(f"{name} {_plain(metrics[name])}" for name in sorted(metrics))
    print(f"window {window}, scorer {scores[0].scorer}" + (f": {told}" if told else ""))
    for name, group in groups:
        if members := [score for score in group if score in shown]:
            _print_group(name, group, members)
    if agent is not None:
        for score in shown:
            _print_details(score)


async def _read(window: str) -> "tuple[dict[str, Any], list[Scored]]":
    from babylon.store import open_store
    from babylon.store.scores import list_scores
    from babylon.store.windows import get_window

    async with open_store(load_settings()) as store:
        row = await get_window(store, window)
        scores = await list_scores(store, window)
    return (row.scored.metrics if row and row.scored else {}), scores


def _group_record(
    name: str, group: "Sequence[Scored]", shown: "Sequence[Scored]"
) -> dict[str, Any]:
    return {
        "scenario": name,
        "best": group[0].agent_id,
        "worst": group[-1].agent_id,
        "agents": [asdict(score) for score in group if score in shown],
    }


def _print_group(name: str, group: "Sequence[Scored]", members: "Sequence[Scored]") -> None:
    rows = [[score.agent_id, score.score, _interval(score), _because(score)] for score in members]
    print_table(f"Scenario {name}", ["agent", "score", "interval", "because"], rows)
    if len(group) > 1 and group[0].score > group[-1].score:
        print(f"best {_equals(group, group[0])}, worst {_equals(group, group[-1])}")
    else:
        print("no differences")


def _print_details(score: "Scored") -> None:
    print(f"\n{score.agent_id} in {score.trajectory_id}:")
    for reason in score.reasons:
        print(f"  - {reason}")
    if score.seen:
        print("\nThe judge saw:\n" + score.seen)


def _equals(group: "Sequence[Scored]", one: "Scored") -> str:
    """Everybody with that one's score: the judge could not tell them apart."""
    return " = ".join(score.agent_id for score in group if score.score == one.score)


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _interval(score: "Scored") -> str:
    if score.low is None or score.high is None:
        return "–"
    return f"{score.low:.2f} to {score.high:.2f}"


def _because(score: "Scored") -> str:
    """The first reason, or the parts of a score that has none."""
    if score.reasons:
        return score.reasons[0]
    return ", ".join(f"{part} {value:.2f}" for part, value in score.components.items())
