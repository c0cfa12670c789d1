"""The game's table ``market_outcomes``: the ground truth of a window, whatever its length.

The game writes one row a market and hour. Our tracker writes one a market and window, with ids that
begin with the window id. Truth of a shorter window is therefore the game's for the whole hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from babylon.core.windows import GAME_MINUTES, Window, outcome_ids, window_at
from babylon.store.connection import Connection, Store

_INSTANT = timedelta(microseconds=1)
# $1: ids of ``outcome_ids``, $2: the window's id. Only the game's own row of an hour reaches into a
# window that starts later.
OF_WINDOW = """
    o."windowId" = ANY($1::text[])
    AND (o."windowId" >= $2 OR NOT starts_with(o.id, o."windowId" || '-'))
"""
# A change from a price of zero is NaN, which JSON cannot hold. An integer column has no NaN.
_OUTCOMES = f"""
    SELECT o."windowId" AS window_id, json_build_object(
        'stockTicker', o."stockTicker",
        'startPrice', nullif(o."startPrice"::numeric, 'NaN'),
        'endPrice', nullif(o."endPrice"::numeric, 'NaN'),
        'changePercent', nullif(o."changePercent"::numeric, 'NaN'),
        'sentiment', o.sentiment,
        'newsEvents', o."newsEvents",
        'predictionMarketId', o."predictionMarketId",
        'question', o.question,
        'outcome', o.outcome,
        'finalProbability', nullif(o."finalProbability"::numeric, 'NaN')
    )::text AS outcome_json
    FROM market_outcomes o WHERE {OF_WINDOW}
    ORDER BY o."windowId" COLLATE "C", o.id COLLATE "C"
"""
_ARRIVED = f"""
    SELECT EXISTS (SELECT FROM market_outcomes o WHERE {OF_WINDOW}
        AND (o."windowId" >= $3 OR o."windowId" = $2 AND starts_with(o.id, $2 || '-'))
    )
"""
_ANY = "SELECT EXISTS (SELECT FROM market_outcomes)"
_EXPECTED = 'SELECT EXISTS (SELECT FROM market_outcomes o WHERE o."windowId" < $1)'


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOutcome:
    """A row of ``market_outcomes``: its window id, and its other columns as JSON."""

    window_id: str
    outcome_json: str


async def window_outcomes(connection: Connection, window: Window) -> list[StoredOutcome]:
    """Return the rows that are true of a window, in order of their own window ids."""
    rows = await connection.fetch(_OUTCOMES, outcome_ids(window), window.id)
    return [StoredOutcome(**row) for row in rows]


async def outcome_count(
    store: Store, connection: Connection, truth: Sequence[StoredOutcome]
) -> int | None:
    """Return the number of a window's outcomes; ``None`` for a task without markets.

    Such a task plays into our own tables, which hold no outcome of any window. A live game's table
    may be empty because the job that writes it never ran, so there the number is 0.
    """
    if truth or not store.game_tables_ours or await connection.fetchval(_ANY):
        return len(truth)
    return None


async def awaits_outcomes(store: Store, window: Window, now: datetime, wait_s: float) -> str:
    """Return the reason to wait for the window's outcomes; empty if there is none.

    The wait ends with the outcomes of the window's last hour, ``wait_s`` after its end, or one
    window's length after its end. A game that never wrote outcomes is not waited for.
    """
    until = window.end + min(timedelta(seconds=wait_s), window.end - window.start)
    if store.game_problem or not window.end <= now < until:
        return ""
    last = window_at(window.end - _INSTANT, GAME_MINUTES)
    async with store.game.acquire() as connection:
        if await connection.fetchval(_ARRIVED, outcome_ids(window), window.id, last.id):
            return ""
        if not await connection.fetchval(_EXPECTED, outcome_ids(window)[0]):
            return ""
    return (
        f"its market outcomes are not written: training waits for them until"
        f" {until:%Y-%m-%dT%H:%M:%S} UTC (OUTCOMES_WAIT_SECONDS)"
    )
