"""Scores and cost as ``babylon judge`` prints them.

The command imports this module when it runs, because the store is slow to load.
"""

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from babylon.cli.output import print_table, printable
from babylon.ops.pages.pairs import PairShown
from babylon.scoring.judge.people import PersonLine
from babylon.scoring.judge.reported_validity import JudgeReport, TrainedJudge, ValidityLine
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
    rows = [[score.agent_id, score.score, _interval(score), score.because] for score in members]
    print_table(f"Scenario {name}", ["agent", "score", "interval", "because"], rows)
    if len(group) > 1 and group[0].score > group[-1].score:
        best, worst = _equals(group, group[0]), _equals(group, group[-1])
        print(printable(f"best {best}, worst {worst}"))
    else:
        print("no differences")


def print_validity(judges: Sequence[JudgeReport]) -> None:
    """Print each judge's windows, and a last row over all of them."""
    for judge in judges:
        rows = [_validity_row(window) for window in judge.windows]
        rows.append(_validity_row(judge.recent))
        about = f"{judge.by.judge}, {judge.by.method}, {judge.by.rubric}"
        columns = ["window", "plays", "agreement", "95 % interval", "evidence", "canaries"]
        print_table(f"{about}: validity {judge.validity:.2f}", columns, rows)
        if judge.canaries:
            columns = ["canary", "asked", "mean", "95 % interval", "right is"]
            answers = [
                [one.kind, one.count, one.mean, f"{one.low:+.2f} to {one.high:+.2f}", one.right]
                for one in judge.canaries
            ]
            print_table("Canaries: gain of copies, right less wrong comparisons", columns, answers)
    if not judges:
        print("no judge has judged a window")


def _validity_row(one: ValidityLine) -> list[str | float | int]:
    answers = [] if one.name == "all" else one.canaries
    told = ", ".join(f"{answer.kind} {answer.value:+.2f}" for answer in answers)
    if one.agreement is None:
        return [one.name, 0, "no outcomes", "", one.evidence, told]
    interval = f"{one.agreement.low:.2f} to {one.agreement.high:.2f}"
    plays, found = one.agreement.trajectories, one.agreement.correlation
    return [one.name, plays, found, interval, one.evidence, told]


def print_training(trained: TrainedJudge) -> None:
    """Print how the trained judge agrees with the outcomes of later windows, beside others."""
    rounds = ", ".join(f"{reward:.3f}" for reward in trained.rewards)
    print(f"{trained.checkpoint}: {len(trained.earlier)} windows taught it")
    print(f"loss {trained.first_loss:.3f} to {trained.last_loss:.3f}, rewards by round {rounds}")
    rows = [
        [one.name, one.judged, "no outcomes", ""]
        if one.agreement is None
        else [
            *(one.name, one.judged, one.agreement.correlation),
            f"{one.agreement.low:.2f} to {one.agreement.high:.2f}",
        ]
        for one in trained.contenders
    ]
    columns = ["judge", "plays", "agreement", "95 % interval"]
    print_table(f"On {len(trained.later)} later windows", columns, rows)


def print_people(people: Sequence[PersonLine]) -> None:
    """Print how often the better one of a person's pairs earned more."""
    rows: list[list[str | float | int]] = [
        [one.person, one.pairs, one.decided, one.right, f"{one.low:.2f} to {one.high:.2f}"]
        if one.right is not None
        else [one.person, one.pairs, 0, "no outcomes", ""]
        for one in people
    ]
    if rows:
        columns = ["person", "pairs", "with outcomes", "better earned more", "95 % interval"]
        print_table("People", columns, rows)


def ask_pair(pair: PairShown) -> tuple[int, str] | None:
    """Show a pair and ask which is better: (0 or 1, reason). Return ``None`` to stop."""
    print(f"\nWindow {pair.window_id}. {pair.answered} of its pairs are answered.")
    for line in pair.truth:
        print(f"  what really happened: {line}")
    for number, play in enumerate(pair.plays, start=1):
        earned = "" if play.pnl_usd is None else f", P&L ${play.pnl_usd:+.2f}"
        print(printable(f"\nPlay {number}: {play.trajectory_id}{earned}"))
        for line in play.lines:
            print(f"  {line}")
    while True:
        try:
            said = input("\nWhich is better, 1 or 2, and why? (q ends) ").strip()
        except EOFError:
            return None
        choice, _, because = said.partition(" ")
        if choice in ("1", "2"):
            return int(choice) - 1, because.strip()
        if choice == "q":
            return None


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
    print(printable(f"\n{score.agent_id} in {score.trajectory_id}:"))
    for reason in score.reasons:
        print(printable(f"  - {reason}"))
    if score.seen:
        print(printable("\nThe judge saw:\n" + score.seen))


def _equals(group: Sequence[ScoredRow], one: ScoredRow) -> str:
    """Return all agents with the same score."""
    return " = ".join(score.agent_id for score in group if score.score == one.score)


def _interval(score: ScoredRow) -> str:
    if score.low is None or score.high is None:
        return "–"
    return f"{score.low:.2f} to {score.high:.2f}"
