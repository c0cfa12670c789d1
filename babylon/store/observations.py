"""The table ``observations``: the first and last observed value of each market in each window.

Several trackers may observe the same market; their order does not matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from babylon.store.connection import Connection


class ValueKind(StrEnum):
    """Meaning of a value: USD, P(YES), or the outcome as 1 for YES and 0 for NO."""

    PRICE = "price"
    PROBABILITY = "probability"
    RESOLUTION = "resolution"


@dataclass(slots=True)
class ObservedValue:
    """The first and last (time, value); of two with one time, the one added later counts."""

    first: tuple[datetime, float]
    last: tuple[datetime, float]

    def add(self, at: datetime, value: float) -> None:
        if at <= self.first[0]:
            self.first = (at, value)
        if at >= self.last[0]:
            self.last = (at, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketObservation:
    """One tracker's observations of one market in one window."""

    kind: ValueKind
    name: str
    window_id: str
    question: str | None
    seen: ObservedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPrice:
    """First and last price of a window (USD)."""

    ticker: str
    start_usd: float
    end_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedQuestion:
    """``yes``: the last P(YES) before the window's end; ``resolved``: YES, NO or still open."""

    market_id: str
    question: str | None
    yes: float | None
    resolved: str | None


async def lock_outcomes(connection: Connection) -> None:
    """Block other writers of observations and outcomes until the transaction ends."""
    await connection.execute("SELECT pg_advisory_xact_lock(hashtext('babylon outcomes'))")


async def keep(connection: Connection, observations: Iterable[MarketObservation]) -> None:
    """Merge observations into the table. Keeping the same ones again changes nothing."""
    await connection.executemany(
        _MERGE,
        [
            (one.kind, one.name, one.window_id, one.question, *one.seen.first, *one.seen.last)
            for one in observations
        ],
    )


async def seen_prices(connection: Connection, window_id: str) -> list[ObservedPrice]:
    """Return each ticker's prices in the window, by ticker."""
    rows = await connection.fetch(
        "SELECT name, first_value, last_value FROM babylon.observations"
        " WHERE window_id = $1 AND kind = 'price' ORDER BY name",
        window_id,
    )
    return [
        ObservedPrice(ticker=ticker, start_usd=start, end_usd=end) for ticker, start, end in rows
    ]


async def seen_questions(connection: Connection, window_id: str) -> list[ObservedQuestion]:
    """Return the questions resolved in the window, or seen in it and still open before it."""
    rows = await connection.fetch(_QUESTIONS, window_id)
    return [
        ObservedQuestion(
            market_id=row["name"],
            question=row["question"],
            yes=row["yes"],
            resolved=None if row["answer"] is None else "YES" if row["answer"] else "NO",
        )
        for row in rows
    ]


_MERGE = """
INSERT INTO babylon.observations AS known
    (kind, name, window_id, question, first_at, first_value, last_at, last_value)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (kind, name, window_id) DO UPDATE SET
    question = coalesce(excluded.question, known.question),
    first_at = least(known.first_at, excluded.first_at),
    first_value = CASE WHEN excluded.first_at <= known.first_at
        THEN excluded.first_value ELSE known.first_value END,
    last_at = greatest(known.last_at, excluded.last_at),
    last_value = CASE WHEN excluded.last_at >= known.last_at
        THEN excluded.last_value ELSE known.last_value END
"""

# Window ids sort by time.
_QUESTIONS = """
SELECT market.name, known.yes, resolution.answer,
    coalesce(known.question, resolution.question) AS question
FROM (
    SELECT DISTINCT name FROM babylon.observations
    WHERE window_id = $1 AND kind IN ('probability', 'resolution')
) AS market
LEFT JOIN LATERAL (
    SELECT question, last_value AS yes FROM babylon.observations
    WHERE kind = 'probability' AND name = market.name AND window_id <= $1
    ORDER BY window_id DESC LIMIT 1
) AS known ON true
LEFT JOIN LATERAL (
    SELECT window_id, question, last_value AS answer FROM babylon.observations
    WHERE kind = 'resolution' AND name = market.name AND window_id <= $1
    ORDER BY window_id DESC LIMIT 1
) AS resolution ON true
WHERE resolution.window_id IS NULL OR resolution.window_id = $1
ORDER BY market.name
"""
