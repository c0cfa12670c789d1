"""The table ``scores``: one number for each scored trajectory."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

from babylon.core.failpoints import failpoint
from babylon.core.types import Claim
from babylon.store.connection import Store, guarded, require_game_tables


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow(StoredScore):
    """A stored score with agent and scenario; without a scenario of its own, that is the window."""

    agent_id: str
    scenario_id: str


async def list_scores(store: Store, window_id: str) -> list[ScoredRow]:
    """Return the window's scores by scenario, best first; empty if it was not scored."""
    require_game_tables(store)
    rows = await store.pool.fetch(
        'SELECT t."agentId" AS agent_id, coalesce(t."scenarioId", s.window_id) AS scenario_id,'
        " s.trajectory_id, s.scorer, s.score, s.low, s.high, s.components, s.reasons, s.seen"
        ' FROM babylon.scores s JOIN trajectories t ON t."trajectoryId" = s.trajectory_id'
        " WHERE s.window_id = $1 ORDER BY scenario_id, s.score DESC, s.trajectory_id",
        window_id,
    )
    return [ScoredRow(**row) for row in rows]


async def replace_scores(store: Store, claim: Claim, rows: Iterable[StoredScore]) -> None:
    """Replace the window's scores, which an earlier attempt may have stored."""
    failpoint("scores.before")
    async with guarded(store, claim) as connection:
        await connection.execute("DELETE FROM babylon.scores WHERE window_id = $1", claim.window_id)
        await connection.executemany(
            "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score, components, low,"
            " high, reasons, seen) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            [(claim.window_id, *astuple(row)) for row in rows],
        )
    failpoint("scores.after")
