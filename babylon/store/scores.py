"""Scores: one number a trajectory, of the trajectories that were scored and no others."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from babylon.store.connection import Store, guarded
from babylon.types import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a scorer said, and the parts it was made of."""

    trajectory_id: str
    scorer: str
    score: float
    components: dict[str, float] = field(default_factory=dict)


async def replace_scores(store: Store, claim: Claim, rows: Iterable[Score]) -> None:
    """Store the window's scores in place of those of an earlier attempt."""
    async with guarded(store, claim) as connection:
        await connection.execute("DELETE FROM babylon.scores WHERE window_id = $1", claim.window_id)
        await connection.executemany(
            "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score, components)"
            " VALUES ($1, $2, $3, $4, $5)",
            [
                (claim.window_id, row.trajectory_id, row.scorer, row.score, row.components)
                for row in rows
            ],
        )
