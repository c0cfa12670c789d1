"""The table ``scores``: one number for each scored trajectory."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from operator import attrgetter

from babylon.core.failpoints import failpoint
from babylon.core.types import Claim, Rejection
from babylon.store.connection import Store, guarded, require_game_tables
from babylon.store.rejections import insert_rejections


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScore:
    """A trajectory's score and its components.

    A judge adds the ends of its interval, its reasons, and the text that it was shown (``seen``).
    """

    trajectory_id: str
    scorer: str
    score: float
    components: dict[str, float] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    reasons: Sequence[str] = ()
    seen: str | None = None

    @property
    def because(self) -> str:
        """The first reason, or the components of a score without reasons."""
        if self.reasons:
            return self.reasons[0]
        return ", ".join(f"{part} {value:.2f}" for part, value in self.components.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow(StoredScore):
    """A stored score with agent and scenario; without a scenario of its own, that is the window."""

    agent_id: str
    scenario_id: str


async def window_scores(store: Store, window_id: str) -> list[StoredScore]:
    """Return the window's scores, best first."""
    rows = await store.pool.fetch(_SCORES, window_id)
    return [StoredScore(**row) for row in rows]


async def trajectory_score(store: Store, trajectory_id: str) -> StoredScore | None:
    """Return a trajectory's newest score, ``None`` if it was never scored."""
    row = await store.pool.fetchrow(
        "SELECT trajectory_id, scorer, score, low, high, components, reasons, seen"
        " FROM babylon.scores WHERE trajectory_id = $1 ORDER BY window_id DESC LIMIT 1",
        trajectory_id,
    )
    return StoredScore(**row) if row else None


_SCORES = """
SELECT trajectory_id, scorer, score, low, high, components, reasons, seen
FROM babylon.scores WHERE window_id = $1 ORDER BY score DESC, trajectory_id
"""


async def list_scores(store: Store, window_id: str) -> list[ScoredRow]:
    """Return the window's scores by scenario, best first; empty if it was not scored."""
    require_game_tables(store)
    scores = await store.pool.fetch(_SCORES, window_id)
    played = await store.game.fetch(
        'SELECT "trajectoryId", "agentId", "scenarioId" FROM trajectories'
        ' WHERE "trajectoryId" = ANY($1::text[])',
        [row["trajectory_id"] for row in scores],
    )
    plays = {name: (agent, scenario or window_id) for name, agent, scenario in played}
    rows = [
        ScoredRow(**row, agent_id=play[0], scenario_id=play[1])
        for row in scores
        if (play := plays.get(row["trajectory_id"]))
    ]
    return sorted(rows, key=attrgetter("scenario_id"))


async def windows_of_play(store: Store, trajectory_id: str) -> set[str]:
    """Return the windows that collected the trajectory, also if it was rejected or thinned out."""
    rows = await store.pool.fetch(
        "SELECT window_id FROM babylon.scores WHERE trajectory_id = $1"
        " UNION SELECT window_id FROM babylon.collected WHERE trajectory_id = $1",
        trajectory_id,
    )
    return {row["window_id"] for row in rows}


async def replace_scores(
    store: Store, claim: Claim, rows: Sequence[StoredScore], rejections: Sequence[Rejection] = ()
) -> None:
    """Replace the window's scores, which an earlier attempt may have stored.

    ``rejections`` are the trajectories that the scorer could not judge.
    """
    failpoint("scores.before")
    async with guarded(store, claim) as connection:
        await connection.execute("DELETE FROM babylon.scores WHERE window_id = $1", claim.window_id)
        await connection.executemany(
            "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score, components, low,"
            " high, reasons, seen) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            [(claim.window_id, *astuple(row)) for row in rows],
        )
        scored = [row.trajectory_id for row in rows] + [one.trajectory_id for one in rejections]
        await connection.execute(
            "DELETE FROM babylon.rejections WHERE window_id = $1 AND trajectory_id = ANY($2)",
            claim.window_id,
            scored,
        )
        await insert_rejections(connection, claim, rejections)
    failpoint("scores.after")
