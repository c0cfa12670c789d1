"""Scores and cost as ``babylon judge`` prints them.

The command imports this module when it runs, because the store is slow to load.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from babylon.cli.output import print_table
from babylon.scoring.judge.reported_validity import JudgeReport, ValidityLine
from babylon.store import Store
from babylon.store.judgments import DaySpent
from babylon.store.scores import ScoredRow, list_scores
from babylon.store.windows import get_window


async def read_scores(store: Store, window: str) -> tuple[dict[str, object], list[ScoredRow]]:
    """Return the scorer's metrics and the scores of a window."""
    row = await get_window(store, window)
    scores = await list_scores(store, window)
    return (dict(row.scored.metrics) if row and row.scored else {}), scores


def print_group(name: str, group: Sequence[ScoredRow], members: Sequence[ScoredRow]) -> None:
    """Print the ``members`` of a scenario's group, and the best and worst of the whole group."""
    rows = [[score.agent_id, score.score, _interval(score), _because(score)] for score in members]
    print_table(f"Scenario {name}", ["agent", "score", "interval", "because"], rows)
    if len(group) > 1 and group[0].score > group[-1].score:
        print(f"best {_equals(group, group[0])}, worst {_equals(group, group[-1])}")
    else:
        print("no differences")


def print_validity(judges: Sequence[JudgeReport]) -> None:
    """Print each judge's windows, and a last row over all of them."""
    for judge in judges:
        rows = [_validity_row(window) for window in judge.windows]
        rows.append(_validity_row(judge.recent))
        about = f"{judge.by.judge}, {judge.by.method}, {judge.by.rubric}"
        columns = ["window", "plays", "agreement", "95 % interval", "evidence"]
        print_table(f"{about}: validity {judge.validity:.2f}", columns, rows)
    if not judges:
        print("no judge has judged a window")


def _validity_row(one: ValidityLine) -> list[str | float | int]:
    if one.agreement is None:
        return [one.name, 0, "no outcomes", "", one.evidence]
    interval = f"{one.agreement.low:.2f} to {one.agreement.high:.2f}"
    plays, found = one.agreement.trajectories, one.agreement.correlation
    return [one.name, plays, found, interval, one.evidence]


def print_cost(rows: Sequence[DaySpent]) -> None:
    """Print the judge's cost by day and window, and the sum of each day."""
    if not rows:
        print("the judge was not asked")
        return
    columns = ["day", "window", "judge", "requests", "unanswered", "tokens", "USD"]
    table = [
        [f"{r.day}", r.window_id, r.judge, r.requests, r.unanswered, r.tokens, Text(f"{r.usd:.4f}")]
        for r in rows
    ]
    print_table("Cost of the judge", columns, table)
    for day, own in groupby(rows, lambda row: row.day):
        paid = list(own)
        tokens, usd = sum(row.tokens for row in paid), sum(row.usd for row in paid)
        print(f"{day}: {tokens} tokens, ${usd:.4f} in {len({r.window_id for r in paid})} windows")


def print_details(score: ScoredRow) -> None:
    """Print all reasons of a score, and the text that the judge saw."""
    print(f"\n{score.agent_id} in {score.trajectory_id}:")
    for reason in score.reasons:
        print(f"  - {reason}")
    if score.seen:
        print("\nThe judge saw:\n" + score.seen)


def _equals(group: Sequence[ScoredRow], one: ScoredRow) -> str:
    """Return all agents with the same score."""
    return " = ".join(score.agent_id for score in group if score.score == one.score)


def _interval(score: ScoredRow) -> str:
    if score.low is None or score.high is None:
        return "–"
    return f"{score.low:.2f} to {score.high:.2f}"


def _because(score: ScoredRow) -> str:
    """Return the first reason, or the components of a score without reasons."""
    if score.reasons:
        return score.reasons[0]
    return ", ".join(f"{part} {value:.2f}" for part, value in score.components.items())
