"""Ground truth of a window: price moves and resolutions of questions.

Ground truth goes to the judge and never into a training prompt. Trackers store their observations
in ``babylon.observations``, and the outcomes of a window are derived from the observations of all
trackers. Several trackers at once produce the same rows as one. A tracker that dies loses only the
observations that it did not save.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Literal

from babylon.core.errors import RecorderError, WindowNotReadyError
from babylon.core.failpoints import failpoint
from babylon.core.text import storable
from babylon.core.windows import parse_window_id, window_at
from babylon.recorder.trajectory import Row, check_utf8, game_time, moment_in_utc, utc_now
from babylon.store.connection import Connection, Store, require_recordable
from babylon.store.observations import (
    MarketObservation,
    ObservedPrice,
    ObservedQuestion,
    ObservedValue,
    ValueKind,
    keep,
    lock_outcomes,
    seen_prices,
    seen_questions,
)

NEUTRAL_PERCENT = 1.0  # smaller moves are neither bullish nor bearish
# Limits of the columns: numeric(5,2), numeric(10,2), varchar(20).
_MAX_PERCENT = 999.99
_MAX_PRICE_USD = 99_999_999.99
_MAX_TICKER = 20


class MarketOutcomesTracker:
    """Tracker of market outcomes. Observations may arrive in any order; their times count."""

    def __init__(
        self, store: Store, *, minutes: int = 60, clock: Callable[[], datetime] = utc_now
    ) -> None:
        require_recordable(store)
        self._store = store
        self._minutes = minutes
        self._clock = clock
        self._questions: dict[str, str] = {}
        self._unsaved: dict[tuple[ValueKind, str, str], ObservedValue] = {}

    def price(self, ticker: str, price_usd: float, *, at: datetime | None = None) -> None:
        """Record a price (USD).

        Raises:
            RecorderError: the price or the ticker does not fit its column.
        """
        # The first is false for NaN too. Less than half a cent would be stored as 0, and the ticker
        # would have no outcome.
        if not 0 < price_usd <= _MAX_PRICE_USD or not _decimal(price_usd, 2):
            raise RecorderError(
                f"price of {ticker}: {price_usd!r} is not in [0.01, {_MAX_PRICE_USD:.2f}]"
            )
        if len(ticker) > _MAX_TICKER:
            raise RecorderError(
                f"ticker {ticker!r} is longer than {_MAX_TICKER} characters: shorten it"
            )
        self._add(ValueKind.PRICE, ticker, price_usd, at)

    def probability(
        self, market_id: str, question: str, yes: float, *, at: datetime | None = None
    ) -> None:
        """Record the market's P(YES) of a question.

        Raises:
            RecorderError: the probability is not in [0, 1], or a text is not UTF-8.
        """
        if not 0 <= yes <= 1:
            raise RecorderError(f"P(YES) of {market_id}: {yes!r} is not in [0, 1]")
        self._ask(market_id, question)
        self._add(ValueKind.PROBABILITY, market_id, yes, at)

    def resolve(
        self,
        market_id: str,
        outcome: Literal["YES", "NO"],
        *,
        question: str | None = None,
        at: datetime | None = None,
    ) -> None:
        """Record the resolution of a question. It belongs to the window of its time.

        Raises:
            RecorderError: the outcome is neither YES nor NO, or the question was neither given nor
                recorded with a probability.
        """
        if outcome not in ("YES", "NO"):  # anything else would count as NO
            raise RecorderError(
                f"the outcome of {market_id} is a {type(outcome).__name__} other than 'YES' and"
                " 'NO': give one of them"
            )
        if question is not None:
            self._ask(market_id, question)
        if storable(market_id) not in self._questions:
            raise RecorderError(f"market {market_id!r} is unknown: give its question")
        self._add(ValueKind.RESOLUTION, market_id, float(outcome == "YES"), at)

    def _ask(self, market_id: str, question: str) -> None:
        check_utf8(question, f"question of market {market_id!r:.80}:")
        self._questions[storable(market_id)] = storable(question)

    async def save(self) -> None:
        """Store the observations so far. ``write`` does this as well."""
        async with self._store.pool.acquire() as connection, connection.transaction():
            unsaved = await self._keep(connection)
        self._forget(unsaved)

    async def write(self, window_id: str) -> int:
        """Write the window's outcomes in one transaction, and return the number of rows.

        A question that is open at the window's end gets a row without an outcome. Writing again
        replaces the rows, because a row's id consists of the window and the ticker or market. Rows
        of other writers for the same ticker or market stay unchanged.

        Raises:
            WindowNotReadyError: the window is not over.
        """
        window = parse_window_id(window_id, self._minutes)
        now = self._clock()
        if not window.is_complete(now):
            raise WindowNotReadyError(
                f"window {window_id} ends at {window.end:%H:%M} UTC, it is {now:%H:%M:%S}:"
                " write its outcomes after its end"
            )
        failpoint("outcomes.before")
        async with self._store.pool.acquire() as connection, connection.transaction():
            unsaved = await self._keep(connection)
            prices = await seen_prices(connection, window_id)
            questions = await seen_questions(connection, window_id)
            rows = [_price_row(window_id, price) for price in prices]
            rows += [_question_row(window_id, question) for question in questions]
            own = [f"{window_id}-price-", f"{window_id}-question-", [row["id"] for row in rows]]
            await connection.execute(_DELETE_OTHERS, window_id, *own)
            for row in rows:
                await connection.execute(_UPSERT, window_id, game_time(now), *row.values())
                failpoint("outcomes.inserted")
        failpoint("outcomes.after")
        # After the commit: what a failed write rolled back is stored the next time.
        self._forget(unsaved)
        return len(rows)

    def _add(self, kind: ValueKind, name: str, value: float, at: datetime | None) -> None:
        moment = moment_in_utc(at, self._clock)
        # One name that Postgres refuses would keep all others from being saved, each time.
        check_utf8(name, "market")
        key = (kind, storable(name), window_at(moment, self._minutes).id)
        seen = self._unsaved.setdefault(key, ObservedValue((moment, value), (moment, value)))
        seen.add(moment, value)

    async def _keep(
        self, connection: Connection
    ) -> dict[tuple[ValueKind, str, str], ObservedValue]:
        """Store the unsaved observations and return them. The lock orders concurrent trackers."""
        await lock_outcomes(connection)
        unsaved = {key: replace(seen) for key, seen in self._unsaved.items()}
        await keep(
            connection,
            [
                MarketObservation(
                    kind=kind,
                    name=name,
                    window_id=window_id,
                    question=self._questions.get(name) if kind != ValueKind.PRICE else None,
                    seen=seen,
                )
                for (kind, name, window_id), seen in unsaved.items()
            ],
        )
        return unsaved

    def _forget(self, saved: dict[tuple[ValueKind, str, str], ObservedValue]) -> None:
        """Drop saved observations that did not change meanwhile. Saving one twice is harmless."""
        for key, seen in saved.items():
            if self._unsaved.get(key) == seen:
                del self._unsaved[key]


def sentiment(change_percent: float) -> str:
    """Return the game's word for a price move."""
    if abs(change_percent) < NEUTRAL_PERCENT:
        return "NEUTRAL"
    return "BULLISH" if change_percent > 0 else "BEARISH"


def _price_row(window_id: str, price: ObservedPrice) -> Row:
    change = min(100 * (price.end_usd / price.start_usd - 1), _MAX_PERCENT)
    return {
        **_EMPTY_ROW,
        "id": f"{window_id}-price-{price.ticker}",
        "stockTicker": price.ticker,
        "startPrice": _decimal(price.start_usd, 2),
        "endPrice": _decimal(price.end_usd, 2),
        "changePercent": _decimal(change, 2),
        "sentiment": sentiment(change),
    }


def _question_row(window_id: str, question: ObservedQuestion) -> Row:
    return {
        **_EMPTY_ROW,
        "id": f"{window_id}-question-{question.market_id}",
        "predictionMarketId": question.market_id,
        "question": question.question,
        "outcome": question.resolved,
        "finalProbability": None if question.yes is None else _decimal(question.yes, 4),
    }


def _decimal(value: float, digits: int) -> Decimal:
    return Decimal(f"{value:.{digits}f}")


_COLUMNS = (
    "id", "stockTicker", "startPrice", "endPrice", "changePercent", "sentiment",
    "predictionMarketId", "question", "outcome", "finalProbability",
)  # fmt: skip
_EMPTY_ROW: Row = dict.fromkeys(_COLUMNS)

# Delete own rows that later observations removed, for example a question resolved earlier.
_DELETE_OTHERS = """
DELETE FROM market_outcomes
WHERE "windowId" = $1 AND (starts_with(id, $2) OR starts_with(id, $3)) AND id <> ALL($4::text[])
"""

_UPSERT = f"""
INSERT INTO market_outcomes ("windowId", "createdAt", {", ".join(f'"{name}"' for name in _COLUMNS)})
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12
WHERE NOT EXISTS (
    SELECT FROM market_outcomes
    WHERE "windowId" = $1::varchar AND id <> $3::text
      AND ("stockTicker" = $4::varchar OR "predictionMarketId" = $9::text)
)
ON CONFLICT (id) DO UPDATE SET {", ".join(f'"{name}" = excluded."{name}"' for name in _COLUMNS)}
"""
