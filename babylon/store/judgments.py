"""The table ``judgments``: every reply that a judge was paid for.

It serves as the cache (a usable reply is found by its key and never bought twice), as the account
(tokens and USD, unusable replies included) and as the record of the judge's reasons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

import msgspec

from babylon.core.failpoints import failpoint
from babylon.store.connection import Connection, Store
from babylon.store.scores import StoredScore

ScorerMetrics = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One reply of a judge.

    ``trajectory_ids``, ``scores`` and ``explanations`` are in the order in which the prompt showed
    the trajectories. ``problem`` says why a reply cannot be used; then there are no scores. ``key``
    is a hash of judge, temperature, repetition and ``prompt_hash``; that one covers prompt version,
    rubric, ground truth, trajectories and their order.
    """

    key: str
    scenario_id: str
    judge: str
    method: str
    rubric: str
    prompt_hash: str
    trajectory_ids: tuple[str, ...]
    scores: tuple[float, ...] = ()
    explanations: tuple[str, ...] = ()
    problem: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0


_COLUMNS = [field.name for field in fields(Purchase)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Tokens of prompts and replies, their cost in US dollars, and the number of paid requests."""

    tokens: int = 0
    usd: float = 0.0
    requests: int = 0


class StoredJudgments:
    """The judgments of one window in Postgres."""

    def __init__(self, store: Store, window_id: str) -> None:
        self._store, self._window_id = store, window_id

    async def find(self, key: str) -> Purchase | None:
        """Return the usable reply to a prompt, else an unusable one, else ``None``."""
        row = await self._store.pool.fetchrow(
            f"SELECT {', '.join(_COLUMNS)} FROM babylon.judgments WHERE key = $1"
            " ORDER BY problem IS NOT NULL LIMIT 1",
            key,
        )
        if row is None:
            return None
        lists = {name: tuple(row[name]) for name in ("trajectory_ids", "scores", "explanations")}
        return Purchase(**{**row, **lists})

    async def keep(self, purchase: Purchase) -> None:
        """Store a reply."""
        failpoint("judgment.before")
        marks = ", ".join(f"${i + 2}" for i in range(len(_COLUMNS)))
        await self._store.pool.execute(
            f"INSERT INTO babylon.judgments (window_id, {', '.join(_COLUMNS)})"
            f" VALUES ($1, {marks})",
            self._window_id,
            *asdict(purchase).values(),
        )
        failpoint("judgment.after")


async def total_spent(
    store: Store, *, window_id: str | None = None, since: datetime | None = None
) -> Spent:
    """Return the cost of the judgments of one window, of all since a moment, or of all."""
    row = await store.pool.fetchrow(
        "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0)::bigint AS tokens,"
        " coalesce(sum(usd), 0) AS usd, count(*) FILTER (WHERE prompt_tokens > 0) AS requests"
        " FROM babylon.judgments WHERE ($1::text IS NULL OR window_id = $1)"
        " AND ($2::timestamptz IS NULL OR created_at >= $2)",
        window_id,
        since,
    )
    assert row is not None  # an aggregate always returns a row
    return Spent(**row)


async def write_to_game(
    connection: Connection,
    scenarios: Mapping[str, str],
    rows: Sequence[StoredScore],
    metrics: ScorerMetrics,
) -> None:
    """Copy scores and reasons into the game's own tables, which must be ours.

    ``scenarios`` maps trajectory id → scenario, the game's group. A row's ``rank`` is its place in
    the group: 1 is the best, and equal scores have equal ranks.
    """
    now = datetime.now(UTC)
    for row in rows:
        reasoning = " ".join(row.reasons)
        group = [
            r.score for r in rows if scenarios[r.trajectory_id] == scenarios[row.trajectory_id]
        ]
        await connection.execute(
            'UPDATE trajectories SET "aiJudgeReward" = $2, "aiJudgeReasoning" = $3,'
            ' "judgedAt" = $4, "updatedAt" = $4 WHERE "trajectoryId" = $1',
            row.trajectory_id,
            row.score,
            reasoning,
            now.replace(tzinfo=None),
        )
        await connection.execute(
            _TELL,
            row.trajectory_id,
            str(metrics.get("model", row.scorer)),
            str(metrics.get("rubric", row.scorer)),
            row.score,
            1 + sum(score > row.score for score in group),
            scenarios[row.trajectory_id],
            reasoning,
            msgspec.json.encode({name: metrics[name] for name in sorted(metrics)}).decode(),
            now.replace(tzinfo=None),
        )


_TELL = """
INSERT INTO reward_judgments (id, "trajectoryId", "judgeModel", "judgeVersion", "overallScore",
    rank, "normalizedScore", "groupId", reasoning, "criteriaJson", "judgedAt")
VALUES ('babylon-' || $1, $1, $2, $3, $4, $5, $4, $6, $7, $8, $9)
ON CONFLICT ("trajectoryId") DO UPDATE SET
    "judgeModel" = excluded."judgeModel",
    "judgeVersion" = excluded."judgeVersion",
    "overallScore" = excluded."overallScore",
    rank = excluded.rank,
    "normalizedScore" = excluded."normalizedScore",
    "groupId" = excluded."groupId",
    reasoning = excluded.reasoning,
    "criteriaJson" = excluded."criteriaJson",
    "judgedAt" = excluded."judgedAt"
"""
