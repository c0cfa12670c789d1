"""Scores that are copied into the game's own tables."""

from collections.abc import Sequence
from typing import Any

from babylon.store.judgments import write_to_game
from babylon.store.scores import StoredScore

COUNT = 1000
compared = 0


class Score(float):
    """A score that counts how often it is compared."""

    def __lt__(self, other: float) -> bool:
        global compared
        compared += 1
        return float(self) < float(other)

    __gt__ = __lt__


class Session:
    """A connection that keeps what it is asked."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, list[Sequence[object]]]] = []

    async def execute(self, query: str, *arguments: object) -> None:
        self.statements.append((query, [arguments]))

    async def executemany(self, query: str, rows: list[Sequence[object]]) -> None:
        self.statements.append((query, rows))


async def test_a_large_window_is_told_in_two_statements_and_with_few_comparisons() -> None:
    """The window's row is locked meanwhile, so a lease that ends cannot be renewed."""
    session: Any = Session()
    # In each of two scenarios two trajectories share each score.
    rows = [
        StoredScore(trajectory_id=f"t{n}", scorer="ruler", score=Score(n // 4), reasons=(f"{n}",))
        for n in range(COUNT)
    ]
    scenarios = {row.trajectory_id: f"s{n % 2}" for n, row in enumerate(rows)}
    await write_to_game(session, scenarios, rows, {"model": "m"})
    marks, told = (rows for _, rows in session.statements)
    assert [row[:3] for row in marks] == [(r.trajectory_id, r.score, r.reasons[0]) for r in rows]
    ranks = {row[0]: row[4] for row in told}
    assert ranks == {f"t{n}": COUNT // 2 - 2 * (n // 4) - 1 for n in range(COUNT)}
    assert [row[5:8] for row in told[:2]] == [("s0", "m", "ruler"), ("s1", "m", "ruler")]
    assert compared < 40 * COUNT
