"""``babylon db export``: a window's play as the game's rows, or as traces for other systems.

Traces carry no ground truth: no ``gameKnowledge``, no outcomes, no verdicts on trades.
"""

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import asyncpg
import msgspec
from msgspec.structs import replace

from babylon.core.errors import DatabaseError, WindowError, reason_of
from babylon.core.game_rows import players_of
from babylon.core.llm_calls import JsonObject, LlmCall, Message
from babylon.core.windows import Window, outcome_ids
from babylon.formats.atif import write_atif
from babylon.formats.captured import number as finite
from babylon.formats.chat_lines import write_chat
from babylon.formats.format_names import Written
from babylon.formats.trace import (
    ImportFileError,
    Tokens,
    Trace,
    TraceStep,
    recorded_action,
    utc,
)
from babylon.quality.decode import without_unread
from babylon.quality.row_checks import RecordedAnswer, read_or_none
from babylon.store.calls import CALL_COLUMNS, CALLS_BEFORE, CALLS_OF_PLAYS, OF_OWNER
from babylon.store.connection import Connection, Store, require_game_tables
from babylon.store.market_outcomes import OF_WINDOW
from babylon.store.play_in_use import IN_TIME
from babylon.store.published import Withheld, read_withheld
from babylon.store.session import in_batches

log = logging.getLogger(__name__)
_AT_A_TIME = 100
# Errors of a row whose JSON has another shape than the game's.
_MALFORMED = (
    *(msgspec.MsgspecError, ImportFileError, RecursionError),
    *(AttributeError, KeyError, TypeError, ValueError, OverflowError),
)
_PROMPTS = ("system", "user")  # an empty result of a tool is a result
_STATE = ("agentBalance", "agentPnL", "openPositions", "activeMarkets")
_ACTION = ("actionType", "success", "parameters", "result", "error", "reasoning")
# Parameters: the window's start and end; for market outcomes those of ``OF_WINDOW``.
_OF_WINDOW = f'SELECT "trajectoryId" FROM trajectories WHERE {IN_TIME}'
_GAME_FILES = {
    "users": f'SELECT u.* FROM "User" u WHERE id IN'
    f' (SELECT "agentId" FROM trajectories WHERE "trajectoryId" IN ({_OF_WINDOW}))'
    ' ORDER BY id COLLATE "C"',
    "trajectories": f"SELECT t.* FROM trajectories t WHERE {IN_TIME}"
    ' ORDER BY "trajectoryId" COLLATE "C"',
    "llm_call_logs": f'SELECT l.* FROM llm_call_logs l WHERE "trajectoryId" IN ({_OF_WINDOW})'
    ' ORDER BY "callId" COLLATE "C"',
    "market_outcomes": f"SELECT o.* FROM market_outcomes o WHERE {OF_WINDOW}"
    ' ORDER BY id COLLATE "C"',
}
# Our own schema may be in another database than the game's tables.
_CALL_FILE = (
    f"SELECT {', '.join(CALL_COLUMNS)} FROM babylon.calls"
    ' WHERE trajectory_id = ANY($1::text[]) ORDER BY call_id COLLATE "C"'
)
_WRITERS: dict[Written, Callable[[Trace], Iterable[JsonObject]]] = {
    Written.ATIF: lambda trace: [write_atif(trace)],
    Written.CHAT: write_chat,
}


async def export_game(store: Store, window: Window, folder: Path) -> dict[str, int]:
    """Write one file of JSON lines for each table, and return the number of lines by table.

    ``import_files`` reads these files back.

    Raises:
        WindowError: no trajectory started in the window.
        DatabaseError: a file exists already.
    """
    await _require_trajectories(store, window)
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    place = (window.start, window.end)
    # One snapshot: a row that arrives meanwhile is in all files of the game's or in none.
    async with (
        store.game.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        for table, rows in _GAME_FILES.items():
            arguments = (outcome_ids(window), window.id) if table == "market_outcomes" else place
            counts[table] = await _write_rows(connection, folder, table, rows, *arguments)
        ids = [row[0] for row in await connection.fetch(_OF_WINDOW, *place)]
    async with store.pool.acquire() as own, own.transaction(readonly=True):
        counts["calls"] = await _write_rows(own, folder, "calls", _CALL_FILE, ids)
    return counts


async def _write_rows(
    connection: Connection, folder: Path, table: str, rows: str, *arguments: object
) -> int:
    """Write a table's file, and return the number of its lines."""
    query, count = f"SELECT row_to_json(r)::text FROM ({rows}) r", 0
    with open_new(folder / f"{table}.jsonl") as file:
        async for records in in_batches(connection, query, *arguments, size=_AT_A_TIME):
            file.writelines(record[0] + "\n" for record in records)
            count += len(records)
    return count


async def export_traces(store: Store, window: Window, format: Written, path: Path) -> int:
    """Write JSON lines, one trajectory (``atif``) or one call (``chat``) each; return their number.

    Raises:
        WindowError: no trajectory started in the window.
        DatabaseError: the file exists already.
    """
    await _require_trajectories(store, window)
    lines = forced = 0
    with open_new(path) as file:
        async for trace in read_window_traces(store, window):
            forced += sum(
                one.untrainable is not None for step in trace.steps for one in step.tokens.values()
            )
            for document in _WRITERS[format](trace):
                file.write(msgspec.json.encode(document).decode() + "\n")
                lines += 1
    if forced and format is Written.CHAT:
        log.warning("left out: %d replies that were not sampled from the policy alone", forced)
    return lines


async def _require_trajectories(store: Store, window: Window) -> None:
    require_game_tables(store)
    query = f"SELECT EXISTS ({_OF_WINDOW})"
    if not await store.game.fetchval(query, window.start, window.end):
        raise WindowError(f"no trajectory was recorded in window {window.id}: nothing to export")


@contextmanager
def open_new(path: Path) -> Iterator[TextIO]:
    """Open a new file, in folders that are made, which appears only when it is complete.

    Raises:
        DatabaseError: the file exists already.
    """
    if path.exists():
        raise DatabaseError(f"{path} exists already: remove it, or choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


async def read_window_traces(store: Store, window: Window) -> AsyncIterator[Trace]:
    """Yield every trajectory of the window with its calls, and their tokens if recorded.

    Trajectories and agents that were taken down are left out, as in the dataset, and with them the
    plays of a shared market that show what they wrote. A row that is not the game's is named in the
    log and left out, as validation rejects it.
    """
    withheld = await read_withheld(store)
    async with (
        store.game.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        absent = {tuple(seat) for seat in await connection.fetch(_SEATS, [*withheld.trajectories])}
        place, since = (window.start, window.end), window.start - CALLS_BEFORE
        async for records in in_batches(connection, _TRACES, *place, size=_AT_A_TIME):
            ids = [record["trajectoryId"] for record in records]
            agents = [record["agentId"] for record in records]
            logs = await _by_trajectory(connection, _LOGS, ids)
            async with store.pool.acquire() as own:
                calls = await _by_trajectory(own, _CALLS, ids, agents, since)
            for record in records:
                name = record["trajectoryId"]
                if _is_down(record, withheld, absent):
                    continue
                try:
                    trace = _trace(record, logs[name], calls[name])
                except _MALFORMED as error:  # it must not hold up the other trajectories
                    log.warning("left out: trajectory %s: %s", name, reason_of(error))
                    continue
                yield trace


def _is_down(
    record: asyncpg.Record, withheld: Withheld, absent: Container[tuple[str, str]]
) -> bool:
    """Return True if the play, or one that shared its market, was taken down."""
    scenario = record["scenarioId"] or record["windowId"]
    return withheld.covers(record["agentId"], record["trajectoryId"]) or any(
        one in withheld.agents or (scenario, one) in absent for one in _players(record["stepsJson"])
    )


class _SeenState(msgspec.Struct):
    market: msgspec.Raw = msgspec.Raw(b"null")


class _SeenStep(msgspec.Struct, rename="camel"):
    environment_state: _SeenState = msgspec.field(default_factory=_SeenState)


def _players(steps_json: str) -> list[str]:
    try:
        steps = msgspec.json.decode(steps_json, type=list[_SeenStep])
    except (msgspec.MsgspecError, RecursionError):  # `_trace` names the row
        return []
    return players_of(steps[0].environment_state.market) if steps else []


# A game may have JSON as jsonb, and numbers as numeric.
_TRACES = f"""
    SELECT "trajectoryId", "agentId", "windowId", "scenarioId", "startTime", "endTime",
        "finalStatus", "finalBalance"::float8, "finalPnL"::float8, "stepsJson"::text
    FROM trajectories t WHERE {IN_TIME} ORDER BY "trajectoryId" COLLATE "C"
"""
_SEATS = """
    SELECT coalesce("scenarioId", "windowId"), "agentId" FROM trajectories
    WHERE "trajectoryId" = ANY($1::text[])
"""
_LOGS = """
    SELECT "trajectoryId" AS trajectory_id, "callId" AS call_id, response,
        "messagesJson"::text AS messages_json, "topP"::float8 AS top_p,
        "promptTokens" AS prompt_tokens, "completionTokens" AS completion_tokens
    FROM llm_call_logs WHERE "trajectoryId" = ANY($1::text[])
"""
_CALLS = f"""
    SELECT c.*, CASE WHEN NOT trainable OR logprobs && '{{NaN,Infinity,-Infinity}}'
        THEN coalesce(untrainable_reason, 'a logprob is not finite') END AS untrainable
    FROM {CALLS_OF_PLAYS} WHERE {OF_OWNER} ORDER BY c.started_at, c.call_id COLLATE "C"
"""


async def _by_trajectory(
    connection: Connection, query: str, *arguments: object
) -> defaultdict[str, list[asyncpg.Record]]:
    rows: defaultdict[str, list[asyncpg.Record]] = defaultdict(list)
    for row in await connection.fetch(query, *arguments):
        rows[row["trajectory_id"]].append(row)
    return rows


@dataclass(frozen=True, slots=True)
class _Records:
    """The rows that are joined to a trajectory's calls, as validation joins them.

    ``logs`` are by call id. A gateway's row counts once: it is taken off ``named``, if a call names
    its id, or off ``others``, which are in order of time.
    """

    logs: dict[str, asyncpg.Record]
    named: dict[str, asyncpg.Record]
    others: list[asyncpg.Record]

    def take(self, call: LlmCall, step: int) -> asyncpg.Record | None:
        """Take the row that the call names, else the first of its step that is equal."""
        if (own := self.named.pop(str(call.call_id), None)) is not None:
            return own
        of_step = (one for one in self.others if one["step_number"] in (step, None))
        found = next((one for one in of_step if _is_equal(one, call)), None)
        if found is not None:
            self.others.remove(found)
        return found


def _trace(
    record: asyncpg.Record, logs: list[asyncpg.Record], calls: list[asyncpg.Record]
) -> Trace:
    own = record["trajectoryId"]
    played = msgspec.json.decode(record["stepsJson"])
    if not played:
        raise ImportFileError("it has no step")  # ATIF requires one
    ids = {str(call.get("callId")) for step in played for call in step.get("llmCalls", ())}
    records = _Records(
        logs={log["call_id"]: log for log in logs},
        named={call["call_id"]: call for call in calls if call["call_id"] in ids},
        others=[call for call in calls if call["call_id"] not in ids],
    )
    return Trace(
        trajectory_id=own,
        agent_id=record["agentId"],
        steps=tuple(_step(step, own, number, records) for number, step in enumerate(played)),
        window_id=record["windowId"],
        scenario_id=record["scenarioId"],
        start=utc(own, record["startTime"]),
        end=utc(own, record["endTime"]),
        final_balance=record["finalBalance"],
        final_pnl=record["finalPnL"],
        status=record["finalStatus"],
    )


def _step(step: dict[str, Any], own: str, place: int, records: _Records) -> TraceStep:
    number = step.get("stepNumber", place)
    calls, tokens = [], {}
    for index, raw in enumerate(step.get("llmCalls", ())):
        call = _call(raw, f"{own}-call-{number}-{index}", records.logs)
        if (found := records.take(call, number)) is not None:
            call = _as_recorded(call, found)
            if (sampled := _tokens(found)) is not None:
                tokens[index] = sampled
        calls.append(call)
    state, action = step.get("environmentState", {}), step.get("action", {})
    return TraceStep(
        calls=tuple(calls),
        tokens=tokens,
        at=_time(step.get("timestamp")),
        state={key: state[key] for key in _STATE if key in state},
        action=recorded_action({key: action[key] for key in _ACTION if key in action}),
        reward=finite(step.get("reward")) or 0.0,
    )


def _time(milliseconds: Any) -> datetime | None:
    """Return the time; None if it is none, because validation does not read it."""
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    return None


def _call(raw: dict[str, Any], own_id: str, logs: dict[str, asyncpg.Record]) -> LlmCall:
    needed = {"systemPrompt": "", "userPrompt": "", "temperature": 1.0, "purpose": "action"}
    known = {**needed, **raw}
    try:
        call = msgspec.convert(known, LlmCall)
    except msgspec.ValidationError:
        without_unread([{"llmCalls": [known]}])
        call = msgspec.convert(known, LlmCall)
    log = logs.get(str(call.call_id)) or logs.get(own_id)
    if log is None or log["response"] != call.response:
        return call
    text = log["messages_json"]
    return replace(
        call,
        messages=msgspec.json.decode(text, type=tuple[Message, ...]) if text else None,
        top_p=log["top_p"],
        prompt_tokens=log["prompt_tokens"],
        completion_tokens=log["completion_tokens"],
    )


def _as_recorded(call: LlmCall, found: asyncpg.Record) -> LlmCall:
    """Return the call as the gateway recorded it. The agent's own words about it do not count."""
    answer = read_or_none(found["answer"], RecordedAnswer) or RecordedAnswer()
    return replace(
        call,
        messages=read_or_none(found["messages"], tuple[Message, ...]) or call.messages,
        response=found["response"],
        tool_calls=answer.tool_calls or call.tool_calls,
        reasoning=answer.reasoning or answer.reasoning_content or call.reasoning,
        temperature=found["temperature"],
        top_p=found["top_p"],
    )


def _tokens(found: asyncpg.Record) -> Tokens | None:
    """Return the tokens of a gateway's row, None if they are unknown.

    Of a reply that must not be trained on, only the reason is kept.
    """
    if (reason := found["untrainable"]) is not None:
        return Tokens(policy_version=found["policy_version"], untrainable=reason)
    sampled = len(found["completion_token_ids"])
    if not (found["prompt_token_ids"] and 0 < sampled == len(found["logprobs"])):
        return None
    tools = msgspec.json.decode(found["parameters"]).get("tools") or ()
    return msgspec.convert({**found, "tools": tools}, Tokens)


def _is_equal(record: asyncpg.Record, call: LlmCall) -> bool:
    if record["response"] != (call.response or ""):
        return False
    said = read_or_none(record["messages"], tuple[Message, ...])  # of a completion, None
    return said is not None and _without_empty(said) == _without_empty(call.prompt)


def _without_empty(messages: Iterable[Message]) -> list[Message]:
    """Return the messages without empty prompts, which the game logs and does not send."""
    return [one for one in messages if one.get("content") or one.get("role") not in _PROMPTS]
