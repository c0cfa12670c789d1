"""``babylon db export``: a window's play as the game's rows, or as traces for other systems.

Traces carry no ground truth: no ``gameKnowledge``, no outcomes, no verdicts on trades.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import asyncpg
import msgspec

from babylon.core.errors import DatabaseError, WindowError
from babylon.core.trajectories import Message
from babylon.formats.atif import write_atif
from babylon.formats.chat_lines import write_chat
from babylon.formats.format_names import Written
from babylon.formats.trace import JsonObject, Tokens, Trace, TraceCall, TraceStep, utc
from babylon.store.connection import Connection, Store, require_game_tables

_AT_A_TIME = 100
_STATE = ("agentBalance", "agentPnL", "openPositions", "activeMarkets")
_ACTION = ("actionType", "success", "parameters", "result", "error", "reasoning")
_OF_WINDOW = 'SELECT "trajectoryId" FROM trajectories WHERE "windowId" = $1'
_GAME_FILES = {
    "users": f'SELECT u.* FROM "User" u WHERE id IN'
    f' (SELECT "agentId" FROM trajectories WHERE "trajectoryId" IN ({_OF_WINDOW}))'
    ' ORDER BY id COLLATE "C"',
    "trajectories": 'SELECT t.* FROM trajectories t WHERE "windowId" = $1'
    ' ORDER BY "trajectoryId" COLLATE "C"',
    "llm_call_logs": f'SELECT l.* FROM llm_call_logs l WHERE "trajectoryId" IN ({_OF_WINDOW})'
    ' ORDER BY "callId" COLLATE "C"',
    "market_outcomes": 'SELECT o.* FROM market_outcomes o WHERE "windowId" = $1'
    ' ORDER BY id COLLATE "C"',
    "calls": f"SELECT c.* FROM babylon.calls c WHERE trajectory_id IN ({_OF_WINDOW})"
    ' ORDER BY call_id COLLATE "C"',
}
GAME_FILES = tuple(_GAME_FILES)
_WRITERS: dict[Written, Callable[[Trace], Iterable[JsonObject]]] = {
    Written.ATIF: lambda trace: [write_atif(trace)],
    Written.CHAT: write_chat,
}


async def export_game(store: Store, window_id: str, folder: Path) -> dict[str, int]:
    """Write one file of JSON lines for each table, and return the number of lines by table.

    ``import_files`` reads these files back.

    Raises:
        WindowError: no trajectory has that window id.
        DatabaseError: a file exists already.
    """
    await _require_trajectories(store, window_id)
    folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(GAME_FILES, 0)
    for table, rows in _GAME_FILES.items():
        query = f"SELECT row_to_json(r)::text FROM ({rows}) r"
        with open_new(folder / f"{table}.jsonl") as file:
            async with store.pool.acquire() as connection, connection.transaction(readonly=True):
                async for record in connection.cursor(query, window_id, prefetch=_AT_A_TIME):
                    file.write(record[0] + "\n")
                    counts[table] += 1
    return counts


async def export_traces(store: Store, window_id: str, format: Written, path: Path) -> int:
    """Write JSON lines, one trajectory (``atif``) or one call (``chat``) each; return their number.

    Raises:
        WindowError: no trajectory has that window id.
        DatabaseError: the file exists already.
    """
    await _require_trajectories(store, window_id)
    lines = 0
    with open_new(path) as file:
        async for trace in read_window_traces(store, window_id):
            for document in _WRITERS[format](trace):
                file.write(msgspec.json.encode(document).decode() + "\n")
                lines += 1
    return lines


async def _require_trajectories(store: Store, window_id: str) -> None:
    require_game_tables(store)
    if not await store.pool.fetchval(f"SELECT EXISTS ({_OF_WINDOW})", window_id):
        raise WindowError(f"no trajectory was recorded in window {window_id}: nothing to export")


@contextmanager
def open_new(path: Path) -> Iterator[TextIO]:
    """Open a new file that appears under its name only when it is complete.

    Raises:
        DatabaseError: the file exists already.
    """
    if path.exists():
        raise DatabaseError(f"{path} exists already: remove it, or choose another path")
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


async def read_window_traces(store: Store, window_id: str) -> AsyncIterator[Trace]:
    """Yield every trajectory of the window with its calls, and their tokens if recorded."""
    async with (
        store.pool.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        cursor = await connection.cursor(_GAME_FILES["trajectories"], window_id)
        while records := await cursor.fetch(_AT_A_TIME):
            ids = [record["trajectoryId"] for record in records]
            logs = await _by_trajectory(connection, _LOGS, ids)
            calls = await _by_trajectory(connection, _CALLS, ids)
            for record in records:
                own = record["trajectoryId"]
                yield _trace(record, logs[own], calls[own])


_LOGS = """
    SELECT "trajectoryId" AS trajectory_id, "callId" AS call_id, "messagesJson" AS messages_json,
        "topP" AS top_p, "promptTokens" AS prompt_tokens, "completionTokens" AS completion_tokens
    FROM llm_call_logs WHERE "trajectoryId" = ANY($1::text[])
"""
_CALLS = """
    SELECT * FROM babylon.calls WHERE trajectory_id = ANY($1::text[]) AND trainable
        AND NOT logprobs && '{NaN,Infinity,-Infinity}'
    ORDER BY started_at, call_id COLLATE "C"
"""


async def _by_trajectory(
    connection: Connection, query: str, ids: Sequence[str]
) -> defaultdict[str, list[asyncpg.Record]]:
    rows: defaultdict[str, list[asyncpg.Record]] = defaultdict(list)
    for row in await connection.fetch(query, ids):
        rows[row["trajectory_id"]].append(row)
    return rows


def _trace(
    record: asyncpg.Record, logs: list[asyncpg.Record], calls: list[asyncpg.Record]
) -> Trace:
    own = record["trajectoryId"]
    by_id = {log["call_id"]: log for log in logs}
    steps: list[TraceStep] = []
    for step in msgspec.json.decode(record["stepsJson"]):
        number = step.get("stepNumber", len(steps))
        waiting = [call for call in calls if call["step_number"] == number]
        steps.append(_step(step, own, number, by_id, waiting))
    return Trace(
        trajectory_id=own,
        agent_id=record["agentId"],
        steps=tuple(steps),
        window_id=record["windowId"],
        scenario_id=record["scenarioId"],
        start=utc(own, record["startTime"]),
        end=utc(own, record["endTime"]),
        final_balance=record["finalBalance"],
        final_pnl=record["finalPnL"],
        status=record["finalStatus"],
    )


def _step(
    step: dict[str, Any],
    own: str,
    number: int,
    logs: dict[str, asyncpg.Record],
    waiting: list[asyncpg.Record],
) -> TraceStep:
    calls = tuple(
        _call(raw, logs.get(f"{own}-call-{number}-{index}"), waiting)
        for index, raw in enumerate(step.get("llmCalls", ()))
    )
    state, action = step.get("environmentState", {}), step.get("action", {})
    stamp = step.get("timestamp")
    return TraceStep(
        calls=calls,
        at=None if stamp is None else datetime.fromtimestamp(stamp / 1000, UTC),
        state={key: state[key] for key in _STATE if key in state},
        action={"parameters": {}, **{key: action[key] for key in _ACTION if key in action}},
        reward=step.get("reward", 0.0),
    )


def _call(
    raw: dict[str, Any], log: asyncpg.Record | None, waiting: list[asyncpg.Record]
) -> TraceCall:
    prompts = (("system", raw.get("systemPrompt")), ("user", raw.get("userPrompt")))
    messages = tuple(Message(role=role, content=text) for role, text in prompts if text)
    if log is not None and log["messages_json"]:
        messages = msgspec.json.decode(log["messages_json"], type=tuple[Message, ...])
    response = raw.get("response") or ""
    return TraceCall(
        messages=messages,
        response=response,
        model=raw.get("model", "unknown"),
        temperature=raw.get("temperature", 1.0),
        top_p=None if log is None else log["top_p"],
        max_tokens=raw.get("maxTokens", 0),
        purpose=raw.get("purpose", "action"),
        action_type=raw.get("actionType"),
        reasoning=raw.get("reasoning"),
        latency_ms=raw.get("latencyMs"),
        prompt_tokens=None if log is None else log["prompt_tokens"],
        completion_tokens=None if log is None else log["completion_tokens"],
        tokens=_tokens(messages, response, waiting),
    )


def _tokens(
    messages: tuple[Message, ...], response: str, waiting: list[asyncpg.Record]
) -> Tokens | None:
    """Take the first gateway row with the same messages and response off ``waiting``."""
    for call in waiting:
        said = msgspec.json.decode(call["messages"], type=tuple[Message, ...])
        if call["response"] == response and said == messages:
            waiting.remove(call)
            return msgspec.convert(dict(call), Tokens)
    return None
