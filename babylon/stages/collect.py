"""Stage ``collect``: stream one window from Postgres into Parquet, as the game wrote it.

A row belongs to the window of its window id, or without one to the window of its start time. No row
is checked here. Call logs and the gateway's calls are joined by trajectory id. Postgres builds the
JSON of token arrays, so that millions of token ids never become Python objects.

Postgres takes long to decompress large texts. So two connections share one snapshot and three steps
overlap: batch N is written, calls are joined to batch N + 1, and Postgres reads batch N + 2.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import asyncpg
import msgspec

from babylon.core.artifacts import ArtifactWriter, Columns
from babylon.core.failpoints import failpoint
from babylon.core.game_rows import COLUMNS, GAME_SCHEMA, UNTRAINED
from babylon.core.home import Home
from babylon.core.types import Claim, Collected
from babylon.core.windows import Window
from babylon.quality.policy_calls import CollectedCall
from babylon.store import Store, require_game_tables
from babylon.store.calls import wait_until_recorded

if TYPE_CHECKING:
    from babylon.store.connection import Connection

T = TypeVar("T")
U = TypeVar("U")
_ROWS_AT_A_TIME = 100

TRAJECTORIES = f"""
    SELECT {COLUMNS} FROM trajectories t
    WHERE (
        t."windowId" = $1
        OR t."windowId" IS NULL
            AND t."startTime" >= $2::timestamptz AT TIME ZONE 'UTC'
            AND t."startTime" < $3::timestamptz AT TIME ZONE 'UTC'
    ) AND {UNTRAINED}
    ORDER BY t."trajectoryId" COLLATE "C"
"""

_LOGS = """
    SELECT l."trajectoryId", l."callId", l.response, l."messagesJson",
        CASE WHEN l."topP" BETWEEN 0 AND 1 THEN l."topP" END
    FROM llm_call_logs l WHERE l."trajectoryId" = ANY($1::text[])
    ORDER BY l.timestamp, l."callId" COLLATE "C"
"""

# Tokens of untrainable calls are left out, because infinite logprobs have no JSON. A client whose
# key is bound to one agent can name another agent's trajectory: such calls are left out too.
_GATEWAY_CALLS = """
    SELECT c.trajectory_id, json_agg(json_build_object(
        'step_number', c.step_number,
        'messages', c.messages,
        'response', c.response,
        'temperature', c.temperature,
        'top_p', c.top_p,
        'policy_version', c.policy_version,
        'prompt_token_ids', CASE WHEN usable THEN c.prompt_token_ids END,
        'completion_token_ids', CASE WHEN usable THEN c.completion_token_ids END,
        'logprobs', CASE WHEN usable THEN c.logprobs END,
        'untrainable', CASE WHEN NOT usable
            THEN coalesce(c.untrainable_reason, 'a logprob is not finite') END
    ) ORDER BY c.started_at, c.call_id COLLATE "C")::text AS list_json
    FROM unnest($1::text[], $2::text[]) t (trajectory_id, agent_id)
        JOIN babylon.calls c ON c.trajectory_id = t.trajectory_id
            AND coalesce(c.agent_id, t.agent_id) = t.agent_id,
        LATERAL (SELECT c.trainable AND NOT c.logprobs && '{NaN,Infinity,-Infinity}' AS usable) u
    WHERE c.step_number IS NOT NULL GROUP BY 1
"""

# A change from a price of zero is NaN, which JSON cannot hold.
_OUTCOMES = """
    SELECT coalesce(json_agg(json_build_object(
        'stockTicker', o."stockTicker",
        'startPrice', nullif(o."startPrice", 'NaN'),
        'endPrice', nullif(o."endPrice", 'NaN'),
        'changePercent', nullif(o."changePercent", 'NaN'),
        'sentiment', o.sentiment,
        'newsEvents', o."newsEvents",
        'predictionMarketId', o."predictionMarketId",
        'question', o.question,
        'outcome', o.outcome,
        'finalProbability', nullif(o."finalProbability", 'NaN')
    ) ORDER BY o.id COLLATE "C"), '[]')::text
    FROM market_outcomes o WHERE o."windowId" = $1
"""


async def collect_window(store: Store, home: Home, claim: Claim, window: Window) -> Collected:
    """Collect every row of the window that was never trained, from one consistent snapshot.

    Raises:
        ServingError: a gateway has not yet recorded all calls of the window.
    """
    require_game_tables(store)
    await wait_until_recorded(store, window.end)
    failpoint("collect.before")
    async with (
        ArtifactWriter(
            home.artifacts, GAME_SCHEMA, stage="collected", window_id=window.key
        ) as writer,
        _snapshot(store) as (connection, beside),
    ):
        outcomes = await connection.fetchval(_OUTCOMES, window.id)
        cursor = await connection.cursor(TRAJECTORIES, window.id, window.start, window.end)
        rows: Columns = {}
        records = await cursor.fetch(_ROWS_AT_A_TIME)
        while rows or records:
            rows, records = await _together(
                _write(writer, rows),
                _joined(beside, records, outcomes),
                cursor.fetch(_ROWS_AT_A_TIME),
            )
    return Collected(claim=claim, artifact=writer.artifact)


async def _joined(
    connection: "Connection", records: list[asyncpg.Record], outcomes: str
) -> Columns:
    """Return the records by column, with their calls and the window's outcomes."""
    if not records:
        return {}
    names, values = records[0].keys(), zip(*records, strict=True)
    columns: Columns = dict(zip(names, values, strict=True))
    ids = columns["trajectory_id"]
    logs = await _logged(connection, ids)
    found = await connection.fetch(_GATEWAY_CALLS, ids, columns["agent_id"])
    gateway = {row[0]: row[1] for row in found}
    columns["logs_json"] = [logs.get(name, "[]") for name in ids]
    columns["gateway_json"] = [gateway.get(name, "[]") for name in ids]
    columns["outcomes_json"] = [outcomes] * len(ids)
    return columns


async def _write(writer: ArtifactWriter, columns: Columns) -> None:
    if columns:
        await asyncio.to_thread(writer.write, columns)
        failpoint("collect.reading")


async def _logged(connection: "Connection", ids: Sequence[str]) -> dict[str, str]:
    """Return trajectory id → JSON list of its calls in the game's log, in order of time."""
    calls: defaultdict[str, list[CollectedCall]] = defaultdict(list)
    for trajectory_id, call_id, response, messages, top_p in await connection.fetch(_LOGS, ids):
        call = CollectedCall(call_id=call_id, response=response, messages=messages, top_p=top_p)
        calls[trajectory_id].append(call)
    return {name: msgspec.json.encode(of_one).decode() for name, of_one in calls.items()}


@asynccontextmanager
async def _snapshot(store: Store) -> AsyncIterator[tuple["Connection", "Connection"]]:
    """Open two read-only connections that share one snapshot of the database."""
    async with (
        store.pool.acquire() as first,
        first.transaction(isolation="repeatable_read", readonly=True),
        store.pool.acquire() as second,
        second.transaction(isolation="repeatable_read", readonly=True),
    ):
        snapshot = await first.fetchval("SELECT pg_export_snapshot()")
        await second.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        yield first, second


async def _together(write: Awaitable[None], join: Awaitable[T], read: Awaitable[U]) -> tuple[T, U]:
    """Run all three concurrently. All end before an error is raised, so connections are idle."""
    results = await asyncio.gather(write, join, read, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(tuple[T, U], tuple(results[1:]))
