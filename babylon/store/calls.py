"""The tables ``calls`` and ``recording_gaps``: every call that a gateway answered.

Training reads them: a call holds the exact tokens and logprobs that the policy sampled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime, timedelta
from operator import attrgetter
from types import NoneType
from typing import Any

import asyncpg
import msgspec

from babylon.core.errors import ConfigError, ServingError
from babylon.store.connection import Connection, Store
from babylon.store.copy_text import copy_text
from babylon.store.gateways import LIVE_S, live_gateways
from babylon.store.routes import CHANNEL

ARE_CALLS_RECORDED = "recorded?"  # asks the gateways to announce ``recorded_until`` at once
MOST_BYTES = 2**27  # of a trajectory's calls; their tokens come to it, and JSON ends at 1 GiB
# Calls begin after their window does, at a gateway whose clock and time zone may be others than the
# game's. A simulated window is played later than its own time, so there is no bound on that side.
CALLS_BEFORE = timedelta(days=1)
_POLL_S = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A row of ``babylon.calls``.

    ``logprobs`` ``[T]``: natural logarithms of the distribution that was sampled from (after
    temperature), one for each of the T completion tokens. ``messages`` and ``parameters`` (the
    request's other fields) are JSON. ``answer``: the answer's message as JSON if it holds more than
    its text ``response``, such as tool calls or reasoning.
    """

    call_id: str
    agent_id: str | None
    trajectory_id: str | None
    step_number: int | None
    policy_version: int
    route_version: int
    model: str
    messages: str
    response: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    finish_reason: str
    trainable: bool
    untrainable_reason: str | None
    started_at: datetime
    latency_ms: int
    arm: str = "champion"
    key_id: str | None = None
    parameters: str = "{}"
    answer: str | None = None

    @property
    def has_tokens(self) -> bool:
        """True if prompt and answer are known token by token, with a logprob for each sampled."""
        sampled = len(self.completion_token_ids)
        return bool(self.prompt_token_ids) and 0 < sampled == len(self.logprobs)


@dataclass(frozen=True, slots=True)
class RecordingGap:
    """Calls that were answered but not recorded, because the disk was full.

    ``call_ids``: those whose ids do not say so, because the disk failed while they were answered.
    """

    gateway_id: str
    began_at: datetime
    ended_at: datetime
    calls: int
    reason: str
    call_ids: Sequence[str] = ()


CALL_COLUMNS = tuple(field.name for field in fields(RecordedCall))
_row = attrgetter(*CALL_COLUMNS)  # dataclasses.astuple would copy every list, number by number


def copy_line(call: RecordedCall) -> bytes:
    """Return a call as a line of COPY's text format, with the columns ``CALL_COLUMNS``.

    It is written here, because asyncpg encodes every array element several times.
    """
    return ("\t".join([_FORMATS[type(value)](value) for value in _row(call)]) + "\n").encode()


async def insert_calls(store: Store, calls: Iterable[RecordedCall]) -> None:
    """Insert all calls or none. A call whose ``call_id`` is stored already stays as it is."""
    await copy_lines(store, CALL_COLUMNS, b"".join(map(copy_line, calls)))


async def copy_lines(store: Store, columns: Sequence[str], lines: bytes) -> None:
    """Insert the calls of all lines or none, as ``insert_calls`` does.

    Args:
        columns: those of the lines; others of the table get their defaults.
    """
    source: Any = memoryview(lines)  # asyncpg would take bytes for the path of a file
    try:
        await store.pool.copy_to_table(
            "calls", schema_name="babylon", columns=columns, source=source
        )
    except asyncpg.UniqueViolationError:
        async with store.pool.acquire() as connection, connection.transaction():
            await connection.execute(
                "CREATE TEMPORARY TABLE copied (LIKE babylon.calls INCLUDING DEFAULTS)"
                " ON COMMIT DROP"
            )
            await connection.copy_to_table(
                "copied", schema_name="pg_temp", columns=columns, source=source
            )
            names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
            await connection.execute(
                f"INSERT INTO babylon.calls ({names}) SELECT {names} FROM pg_temp.copied"
                " ON CONFLICT DO NOTHING"
            )


async def find_call(store: Store, call_id: str) -> RecordedCall:
    """Return a stored call.

    Raises:
        ConfigError: no call has this id.
    """
    row = await store.pool.fetchrow(
        f"SELECT {', '.join(CALL_COLUMNS)} FROM babylon.calls WHERE call_id = $1", call_id
    )
    if row is None:
        raise ConfigError(
            f"no call {call_id!r:.80} is stored: name the `id` of an answer that is younger than"
            " RETENTION_DAYS"
        )
    return RecordedCall(**dict(row))


async def too_large_plays(
    store: Store, trajectory_ids: Sequence[str], agents: Sequence[str], since: datetime
) -> set[str]:
    """Return the trajectories whose calls ``since`` then are too large to be read at once."""
    rows = await store.pool.fetch(_SIZES, trajectory_ids, agents, since, MOST_BYTES)
    for trajectory_id, size in rows:
        log.warning(
            "trajectory %s: its calls have %d bytes, of at most %d, so it is rejected: let the"
            " agent begin a new trajectory sooner",
            *(trajectory_id, size, MOST_BYTES),
        )
    return {row["trajectory_id"] for row in rows}


async def upsert_gap(store: Store, gap: RecordingGap) -> None:
    """Store a gap, or extend the one that began at the same time."""
    await store.pool.execute(
        "INSERT INTO babylon.recording_gaps VALUES ($1, $2, $3, $4, $5, $6)"
        " ON CONFLICT (gateway_id, began_at) DO UPDATE SET"
        " ended_at = excluded.ended_at, calls = excluded.calls, call_ids = excluded.call_ids",
        *astuple(gap),
    )


async def lost_calls(connection: Connection, call_ids: Sequence[str]) -> set[str]:
    """Return those of the calls that the disk did not take."""
    rows = await connection.fetch(
        "SELECT unnest(call_ids) AS id FROM babylon.recording_gaps WHERE call_ids && $1", call_ids
    )
    return {row["id"] for row in rows} & {*call_ids}


async def wait_until_recorded(
    store: Store,
    moment: datetime | None = None,
    *,
    timeout_s: float = 10.0,
    silent_s: float = LIVE_S,
) -> None:
    """Wait until every call that a gateway answered before ``moment`` (now) is stored.

    Times are by the database's clock.
    Gateways that have been silent for ``silent_s`` are not waited for.

    Raises:
        ServingError: gateways still hold calls after the timeout; the message names them.
    """
    deadline = time.monotonic() + timeout_s
    moment = moment or await store.pool.fetchval("SELECT clock_timestamp()")
    while True:
        # Asked, gateways say at once what is recorded. By themselves they say it every few seconds.
        await store.pool.execute("SELECT pg_notify($1, $2)", CHANNEL, ARE_CALLS_RECORDED)
        await asyncio.sleep(_POLL_S)
        late = [
            gateway
            for gateway in await live_gateways(store, silent_s)
            if gateway.recorded_until is None or gateway.recorded_until < moment
        ]
        if not late:
            return
        if time.monotonic() > deadline:
            raise ServingError(
                f"calls are not in the database after {timeout_s:.0f} s; they wait with"
                f" {', '.join(map(str, late))}: look at its log"
            )


# The calls ``c`` of trajectories and their agents ($1, $2) since a time ($3). A client may name
# another's trajectory while a gateway cannot ask who began it: such calls are no part of it.
CALLS_OF_PLAYS = """
unnest($1::text[], $2::text[]) t (trajectory_id, agent_id)
    JOIN babylon.calls c ON c.started_at >= $3 AND c.trajectory_id = t.trajectory_id
        AND coalesce(c.agent_id, t.agent_id) = t.agent_id
    LEFT JOIN babylon.plays p ON p.trajectory_id = c.trajectory_id
"""
OF_OWNER = "coalesce(p.key_id = c.key_id, true)"

# Postgres knows the length of a long text without reading it.
_SIZES = f"""
SELECT * FROM (
    SELECT c.trajectory_id, sum(
        octet_length(c.messages) + octet_length(c.response) + octet_length(c.parameters)
        + coalesce(octet_length(c.answer), 0)
    ) AS size FROM {CALLS_OF_PLAYS} WHERE {OF_OWNER} GROUP BY 1
) AS plays WHERE size > $4 ORDER BY 1
"""


def _array(value: list[float]) -> str:
    listed = msgspec.json.encode(value).decode()
    if "null" in listed:  # JSON writes NaN and infinity as null; Python writes nan and inf
        listed = str(value)
    return "{" + listed[1:-1] + "}"


_FORMATS: dict[type, Callable[[Any], str]] = {
    str: copy_text,
    list: _array,
    int: repr,
    float: repr,
    bool: repr,
    NoneType: lambda _: r"\N",
    datetime: datetime.isoformat,
}
