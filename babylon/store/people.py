"""Judgments of people: rows of ``babylon.judgments`` whose judge is ``person:NAME``.

A row is the answer to one pair, in the form of a ``preference``: the better trajectory has the
score 1, the other 0. It costs nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from babylon.store.connection import Store
from babylon.store.judgments import Purchase, Spent, StoredJudgments

PERSON = "person:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAnswer:
    """A person's answer. ``better`` and ``worse`` are trajectory ids, ``first`` was shown first."""

    window_id: str
    scenario_id: str
    person: str
    better: str
    worse: str
    first: str


class _NoLimit:
    def require(self, spent: object, cost: Spent) -> None:
        """Let every entry pass."""


async def store_answer(store: Store, answer: PairAnswer, because: str = "") -> None:
    """Store a person's answer, in place of an earlier one to the same pair."""
    pair = sorted((answer.better, answer.worse))
    judge = PERSON + answer.person
    shown = (answer.first, next(name for name in pair if name != answer.first))
    purchase = Purchase(
        key=hashlib.sha256("\n".join((judge, answer.window_id, *pair)).encode()).hexdigest(),
        scenario_id=answer.scenario_id,
        judge=judge,
        method="preference",
        rubric="people",
        prompt_hash="",
        trajectory_ids=shown,
        scores=tuple(float(name == answer.better) for name in shown),
        explanations=(because, because),
    )
    known = await store.pool.fetchval(
        "SELECT max(judgment_id) FROM babylon.judgments WHERE key = $1", purchase.key
    )
    ledger = StoredJudgments(store, answer.window_id)
    if known is None:
        await ledger.enter(purchase, _NoLimit())
    else:
        await ledger.settle(known, purchase)


async def read_answers(
    store: Store, windows: Sequence[str] | None = None, person: str | None = None
) -> list[PairAnswer]:
    """Return the answers of people about windows, oldest first; by default about all.

    Two clicks at the same time may have stored two rows of one pair. The newest one counts.
    """
    rows = await store.pool.fetch(
        "SELECT key, window_id, scenario_id, judge, trajectory_ids, scores FROM babylon.judgments"
        " WHERE starts_with(judge, 'person:') AND problem IS NULL"
        " AND ($1::text[] IS NULL OR window_id = ANY($1)) AND ($2::text IS NULL OR judge = $2)"
        " ORDER BY judgment_id",
        windows,
        person and PERSON + person,
    )
    answers = []
    for row in {row["key"]: row for row in rows}.values():
        first, second = row["trajectory_ids"]
        better, worse = (first, second) if row["scores"][0] else (second, first)
        answers.append(
            PairAnswer(
                window_id=row["window_id"],
                scenario_id=row["scenario_id"],
                person=row["judge"].removeprefix(PERSON),
                better=better,
                worse=worse,
                first=first,
            )
        )
    return answers
