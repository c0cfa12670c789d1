"""The tables ``calls`` and ``recording_gaps``: every call that a gateway answered.

Training reads them: a call holds the exact tokens and logprobs that the policy sampled.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from types import NoneType
from typing import Any

import asyncpg
import msgspec

from babylon.core.errors import ConfigError, ServingError
from babylon.store.connection import Connection, Store
from babylon.store.copy_text import copy_text
from babylon.store.gateways import live_gateways
from babylon.store.routes import CHANNEL

ARE_CALLS_RECORDED = "recorded?"  # asks the gateways to announce ``recorded_until`` at once
_POLL_S = 0.05
_AT_ONCE = 4  # calls
_REST_S = 0.001  # between them


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


CALL_COLUMNS = [field.name for field in fields(RecordedCall)]
_row = attrgetter(*CALL_COLUMNS)  # dataclasses.astuple would copy every list, number by number
_INSERT = (
    f"INSERT INTO babylon.calls ({', '.join(CALL_COLUMNS)})"
    f" VALUES ({', '.join(f'${i + 1}' for i in range(len(CALL_COLUMNS)))}) ON CONFLICT DO NOTHING"
)


async def insert_calls(store: Store, calls: Iterable[RecordedCall]) -> None:
    """Insert all calls or none. A call whose ``call_id`` is stored already stays as it is."""
    await store.pool.executemany(_INSERT, [_row(call) for call in calls])


async def copy_calls(store: Store, calls: Sequence[RecordedCall]) -> None:
    """Insert calls as ``insert_calls`` does, but faster: by COPY, while every call is new.

    COPY's text format is written here, because asyncpg encodes every array element several times.
    """
    try:
        await store.pool.copy_to_table(
            "calls", schema_name="babylon", columns=CALL_COLUMNS, source=_lines(calls)
        )
    except asyncpg.UniqueViolationError:
        await insert_calls(store, calls)


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
    store: Store, moment: datetime | None = None, *, timeout_s: float = 10.0
) -> None:
    """Wait until every call that a live gateway answered before ``moment`` (now) is stored.

    Raises:
        ServingError: gateways still hold calls after the timeout; the message names them.
    """
    moment, deadline = moment or datetime.now(UTC), time.monotonic() + timeout_s
    while True:
        await store.pool.execute("SELECT pg_notify($1, $2)", CHANNEL, ARE_CALLS_RECORDED)
        await asyncio.sleep(_POLL_S)
        late = [
            gateway
            for gateway in await live_gateways(store)
            if gateway.recorded_until is None or gateway.recorded_until < moment
        ]
        if not late:
            return
        if time.monotonic() > deadline:
            names = ", ".join(map(str, late))
            raise ServingError(
                f"calls are not in the database after {timeout_s:.0f} s; they wait with {names}:"
                " look at its log"
            )


async def _lines(calls: Sequence[RecordedCall]) -> AsyncIterator[bytes]:
    """Yield COPY's text format, a few calls at a time: a gateway answers requests in between.

    A request takes several turns of the event loop. Without a rest, each of them would wait for a
    few calls. https://www.postgresql.org/docs/current/sql-copy.html
    """
    for start in range(0, len(calls), _AT_ONCE):
        yield b"".join(map(_line, calls[start : start + _AT_ONCE]))
        await asyncio.sleep(_REST_S)


def _line(call: RecordedCall) -> bytes:
    return ("\t".join([_FORMATS[type(value)](value) for value in _row(call)]) + "\n").encode()


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
