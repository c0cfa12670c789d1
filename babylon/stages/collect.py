"""Stage ``collect``: stream one window from Postgres into Parquet, as the game wrote it.

A row belongs to the window in which it started, whatever window id it carries: the game's ids are
hourly, and our windows need not be. No row is checked here. Call logs and the gateway's calls are
joined by trajectory id. Postgres builds the JSON of token arrays, so that millions of token ids
never become Python objects.

Postgres takes long to decompress large texts. So two connections share one snapshot and three steps
overlap: batch N is written, calls are joined to batch N + 1, and Postgres reads batch N + 2.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import TypeVar, cast

import asyncpg
import msgspec

from babylon.core.artifacts import ArtifactWriter, Columns
from babylon.core.failpoints import failpoint
from babylon.core.game_rows import COLUMNS, FOR_TRAINING, GAME_SCHEMA
from babylon.core.home import Home
from babylon.core.types import Claim, Collected
from babylon.core.windows import Window
from babylon.quality.merge_outcomes import merge_outcomes
from babylon.quality.row_checks import Log
from babylon.store import Store, require_game_tables
from babylon.store.calls import (
    CALL_COLUMNS,
    CALLS_BEFORE,
    CALLS_OF_PLAYS,
    OF_OWNER,
    too_large_plays,
    wait_until_recorded,
)
from babylon.store.connection import Connection, game_snapshot, read_clock
from babylon.store.game_tables import batches_of_plays
from babylon.store.late import finished_play, free_for_training
from babylon.store.market_outcomes import outcome_count, window_outcomes
from babylon.store.replica import wait_until_replicated

T = TypeVar("T")
U = TypeVar("U")
_SILENT_S = 60.0  # a gateway that a stalled database silenced for so long still holds calls
_WAIT_S = 70.0  # until one that died counts as silent

TRAJECTORIES = f"""
    SELECT t."trajectoryId", t."agentId" FROM trajectories t
    WHERE t."startTime" >= $1::timestamptz AT TIME ZONE 'UTC'
      AND t."startTime" < $2::timestamptz AT TIME ZONE 'UTC'
      AND NOT t."startTime" <@ $3::text::tsmultirange
      AND {FOR_TRAINING}
    ORDER BY t."trajectoryId" COLLATE "C"
"""

_ROWS = f"""
    SELECT {COLUMNS} FROM trajectories t WHERE t."trajectoryId" = ANY($1::text[])
    ORDER BY t."trajectoryId" COLLATE "C"
"""

_LOGS = """
    SELECT l."trajectoryId", l."callId", l.response, l."messagesJson"::text,
        CASE WHEN l."topP" BETWEEN 0 AND 1 THEN l."topP"::float8 END
    FROM llm_call_logs l WHERE l."trajectoryId" = ANY($1::text[])
    ORDER BY l.timestamp, l."callId" COLLATE "C"
"""

# Tokens of untrainable calls are left out, because infinite logprobs have no JSON.
_USABLE = {
    "prompt_token_ids": "CASE WHEN usable THEN c.prompt_token_ids ELSE '{}' END",
    "completion_token_ids": "CASE WHEN usable THEN c.completion_token_ids ELSE '{}' END",
    "logprobs": "CASE WHEN usable THEN c.logprobs ELSE '{}' END",
    "trainable": "usable",
    "untrainable_reason": "CASE WHEN NOT usable"
    " THEN coalesce(c.untrainable_reason, 'a logprob is not finite') END",
}
GATEWAY_CALLS = f"""
    SELECT trajectory_id, json_agg(row_to_json(r) ORDER BY started_at, call_id COLLATE "C")::text
    FROM (
        SELECT {", ".join(f"{_USABLE.get(name, 'c.' + name)} AS {name}" for name in CALL_COLUMNS)}
        FROM {CALLS_OF_PLAYS} CROSS JOIN LATERAL (
            SELECT c.trainable AND NOT c.logprobs && '{{NaN,Infinity,-Infinity}}' AS usable
        ) u WHERE {OF_OWNER}
    ) r GROUP BY 1
"""


async def collect_window(
    store: Store, home: Home, claim: Claim, window: Window, *, scored: Sequence[str] | None = None
) -> Collected:
    """Collect every row of the window that was never trained, from one consistent snapshot.

    With ``scored`` these are the rows of those trajectory ids, trained or not.

    Raises:
        ServingError: a gateway has not yet recorded all calls of the window.
    """
    require_game_tables(store)
    # Until now and not the window's end: a play that began in it may go on.
    now = (await read_clock(store)).now
    await wait_until_recorded(store, now, timeout_s=_WAIT_S, silent_s=_SILENT_S)
    # Rows are written after the window too, and a writer is waited for as long as a window lasts.
    await wait_until_replicated(store, min(now, window.next().end))
    elsewhere = "{}" if window.recipe else await finished_play(store)
    failpoint("collect.before")
    async with (
        ArtifactWriter(home, GAME_SCHEMA, stage="collected", window_id=window.key) as writer,
        game_snapshot(store) as (connection, beside),
    ):
        truth = await window_outcomes(connection, window)
        outcomes, count = merge_outcomes(truth), await outcome_count(store, connection, truth)
        # Ids first, because our database knows what was trained, and the game may have another one.
        ids = sorted(scored or ())
        if scored is None:
            found = await connection.fetch(TRAJECTORIES, window.start, window.end, elsewhere)
            free = await free_for_training(store, *([row[at] for row in found] for at in (0, 1)))
            ids = [row[0] for row in found if row[0] in free]
        batches = iter(await batches_of_plays(connection, ids))
        rows: Columns = {}
        records = await _read(connection, next(batches, []))
        while rows or records:
            rows, records = await _together(
                _write(writer, rows),
                _joined(store, beside, records, outcomes, window.start - CALLS_BEFORE),
                _read(connection, next(batches, [])),
            )
    return Collected(claim=claim, artifact=writer.artifact, outcomes=count)


async def _read(connection: Connection, ids: Sequence[str]) -> list[asyncpg.Record]:
    return await connection.fetch(_ROWS, ids) if ids else []


async def _joined(
    store: Store,
    connection: Connection,
    records: list[asyncpg.Record],
    outcomes: str,
    since: datetime,
) -> Columns:
    """Return the records by column, with their calls ``since`` and the window's outcomes."""
    if not records:
        return {}
    names, values = records[0].keys(), zip(*records, strict=True)
    columns: Columns = dict(zip(names, values, strict=True))
    ids = columns["trajectory_id"]
    logs = await _logged(connection, ids)
    large = await too_large_plays(store, ids, columns["agent_id"], since)
    sound = [None if name in large else name for name in ids]
    found = await store.pool.fetch(GATEWAY_CALLS, sound, columns["agent_id"], since)
    gateway = {row[0]: row[1] for row in found}
    columns["logs_json"] = [logs.get(name, "{}") for name in ids]
    columns["gateway_json"] = ["null" if n in large else gateway.get(n, "[]") for n in ids]
    columns["outcomes_json"] = [outcomes] * len(ids)
    return columns


async def _write(writer: ArtifactWriter, columns: Columns) -> None:
    if columns:
        await asyncio.to_thread(writer.write, columns)
        failpoint("collect.reading")


async def _logged(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return trajectory id → its logs by call id, as JSON."""
    calls: defaultdict[str, dict[str, Log]] = defaultdict(dict)
    for trajectory_id, call_id, *log in await connection.fetch(_LOGS, ids):
        calls[trajectory_id][call_id] = cast(Log, tuple(log))
    return {name: msgspec.json.encode(of_one).decode() for name, of_one in calls.items()}


async def _together(write: Awaitable[None], join: Awaitable[T], read: Awaitable[U]) -> tuple[T, U]:
    """Run all three concurrently. All end before an error is raised, so connections are idle."""
    results = await asyncio.gather(write, join, read, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(tuple[T, U], tuple(results[1:]))
