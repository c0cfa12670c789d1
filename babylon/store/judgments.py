"""The table ``judgments``: every request that was sent to a judge.

It serves as the cache (a usable reply is found by its key and never bought twice), as the ledger
(tokens and USD, unusable and missing replies included) and as the record of the judge's reasons. A
row is entered before its request is sent, so a process that dies has paid for what it asked.
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from typing import Protocol

import msgspec

from babylon.core.failpoints import failpoint
from babylon.store.connection import Connection, Store
from babylon.store.scores import StoredScore

ScorerMetrics = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One request to a judge, and its reply.

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
    cached_tokens: int = 0


_COLUMNS = [field.name for field in fields(Purchase)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Tokens of prompts and replies, their cost in US dollars, and the number of paid requests.

    ``cached_tokens`` of the prompts came from the provider's cache.
    """

    tokens: int = 0
    usd: float = 0.0
    requests: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Cost of one window, and of the present UTC day in all windows."""

    window: Spent = Spent()
    day: Spent = Spent()


class Limits(Protocol):
    """Limits that a new request must stay within."""

    def require(self, spent: Accounts, cost: Spent) -> None:
        """Raise an error if the cost does not fit."""


_LEDGER_LOCK = 0x6A_7564_6765  # "judge": one request is entered at a time
_SPENT = (
    "coalesce(sum(prompt_tokens + completion_tokens), 0)::bigint AS tokens,"
    " coalesce(sum(usd), 0) AS usd, coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,"
    " count(*) FILTER (WHERE prompt_tokens + completion_tokens > 0) AS requests"
)
_TODAY = "date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'"

_DAY = f"SELECT {_SPENT} FROM babylon.judgments WHERE created_at >= {_TODAY}"


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

    async def spent(self) -> Accounts:
        """Return the cost of the window and of the day, requests in flight included."""
        async with self._store.pool.acquire() as connection:
            return await self._accounts(connection)

    async def enter(self, purchase: Purchase, budget: Limits) -> int:
        """Enter a request at its worst case, before it is sent, and return the row's number.

        Raises:
            Exception: ``budget.require`` raised it; nothing was entered.
        """
        marks = ", ".join(f"${i + 2}" for i in range(len(_COLUMNS)))
        async with self._store.pool.acquire() as connection, connection.transaction():
            # Two requests that see the same sum could exceed a limit together.
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _LEDGER_LOCK)
            cost = Spent(
                tokens=purchase.prompt_tokens + purchase.completion_tokens, usd=purchase.usd
            )
            budget.require(await self._accounts(connection), cost)
            number: int = await connection.fetchval(
                f"INSERT INTO babylon.judgments (window_id, {', '.join(_COLUMNS)})"
                f" VALUES ($1, {marks}) RETURNING judgment_id",
                self._window_id,
                *asdict(purchase).values(),
            )
            return number

    async def settle(self, number: int, purchase: Purchase) -> None:
        """Replace the row of a request by what became of it."""
        failpoint("judgment.before")
        columns = ", ".join(f"{name} = ${i + 2}" for i, name in enumerate(_COLUMNS))
        await self._store.pool.execute(
            f"UPDATE babylon.judgments SET {columns} WHERE judgment_id = $1",
            number,
            *asdict(purchase).values(),
        )
        failpoint("judgment.after")

    async def forget(self, keys: Collection[str]) -> None:
        """Find no unusable reply by these keys any more. Its cost stays."""
        await self._store.pool.execute(
            "UPDATE babylon.judgments SET key = key || '/forgotten'"
            " WHERE key = ANY($1) AND problem IS NOT NULL",
            list(keys),
        )

    async def _accounts(self, connection: Connection) -> Accounts:
        window = await connection.fetchrow(
            f"SELECT {_SPENT} FROM babylon.judgments WHERE window_id = $1", self._window_id
        )
        day = await connection.fetchrow(_DAY)
        assert window is not None and day is not None  # an aggregate always returns a row
        return Accounts(window=Spent(**window), day=Spent(**day))


async def spent_today(store: Store) -> Spent:
    """Return the cost of the present UTC day, requests in flight included."""
    row = await store.pool.fetchrow(_DAY)
    assert row is not None  # an aggregate always returns a row
    return Spent(**row)


async def total_spent(store: Store, window_id: str) -> Spent:
    """Return the cost of all requests about one window."""
    row = await store.pool.fetchrow(
        f"SELECT {_SPENT} FROM babylon.judgments WHERE window_id = $1", window_id
    )
    assert row is not None  # an aggregate always returns a row
    return Spent(**row)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySpent(Spent):
    """Cost of one window on one UTC day by one judge. ``unanswered``: requests without a reply."""

    day: date
    window_id: str
    judge: str
    unanswered: int


async def spent_by_day(
    store: Store, since: datetime | None = None, window_id: str | None = None
) -> list[DaySpent]:
    """Return the cost by day, window and judge since a moment, the newest first."""
    rows = await store.pool.fetch(
        f"SELECT (created_at AT TIME ZONE 'UTC')::date AS day, window_id, judge, {_SPENT},"
        " count(*) FILTER (WHERE key LIKE '%/sent') AS unanswered FROM babylon.judgments"
        " WHERE ($1::timestamptz IS NULL OR created_at >= $1)"
        " AND ($2::text IS NULL OR window_id = $2) AND NOT starts_with(judge, 'person:')"
        " GROUP BY 1, 2, 3 ORDER BY 1 DESC, 2 DESC, 3",
        since,
        window_id,
    )
    return [DaySpent(**row) for row in rows]


async def usd_of_days(store: Store, days: Collection[date]) -> dict[date, float]:
    """Return UTC day → cost of all windows in US dollars, for days on which there was any."""
    rows = await store.pool.fetch(
        "SELECT (created_at AT TIME ZONE 'UTC')::date AS day, sum(usd) AS usd"
        " FROM babylon.judgments WHERE (created_at AT TIME ZONE 'UTC')::date = ANY($1) GROUP BY 1",
        list(days),
    )
    return {row["day"]: float(row["usd"]) for row in rows}


async def usd_by_window(
    store: Store, *, windows: Sequence[str] | None = None, since: datetime | None = None
) -> dict[str, float]:
    """Return window id → cost in US dollars, of these windows, of requests since a moment."""
    rows = await store.pool.fetch(
        "SELECT window_id, sum(usd) AS usd FROM babylon.judgments"
        " WHERE ($1::text[] IS NULL OR window_id = ANY($1))"
        " AND ($2::timestamptz IS NULL OR created_at >= $2) GROUP BY 1",
        windows,
        since,
    )
    return {row["window_id"]: float(row["usd"]) for row in rows}


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
    now = datetime.now(UTC).replace(tzinfo=None)
    model, rubric = (str(metrics.get(name, rows[0].scorer)) for name in ("model", "rubric"))
    criteria = msgspec.json.encode({name: metrics[name] for name in sorted(metrics)}).decode()
    groups: dict[str, list[float]] = {}
    for row in rows:
        insort(groups.setdefault(scenarios[row.trajectory_id], []), row.score)
    told = []
    for row in rows:
        scenario = scenarios[row.trajectory_id]
        rank = 1 + len(groups[scenario]) - bisect_right(groups[scenario], row.score)
        told.append((row.trajectory_id, row.score, " ".join(row.reasons), now, rank, scenario))
    # In few statements: the window's row is locked meanwhile, and its lease cannot be renewed.
    await connection.executemany(_MARK, [one[:4] for one in told])
    await connection.executemany(_TELL, [(*one, model, rubric, criteria) for one in told])


_MARK = """
UPDATE trajectories SET "aiJudgeReward" = $2, "aiJudgeReasoning" = $3, "judgedAt" = $4,
    "updatedAt" = $4 WHERE "trajectoryId" = $1
"""
_TELL = """
INSERT INTO reward_judgments (id, "trajectoryId", "judgeModel", "judgeVersion", "overallScore",
    rank, "normalizedScore", "groupId", reasoning, "criteriaJson", "judgedAt")
VALUES ('babylon-' || $1, $1, $7, $8, $2, $5, $2, $6, $3, $9, $4)
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
