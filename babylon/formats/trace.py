"""A trajectory between formats: every format is read into a ``Trace`` and written from one.

A trace holds no ground truth, because it is trained on and given to other people.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from babylon.core.errors import DatabaseError
from babylon.core.llm_calls import JsonObject, LlmCall, Message
from babylon.core.windows import FIRST_YEAR, LAST_YEAR

T = TypeVar("T")
RESPONSE = "RESPONSE"  # action type of a step whose action is unknown
ROLES = ("system", "developer", "user", "assistant", "tool")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ImportFileError(DatabaseError):
    """A file that cannot be imported. The import writes nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """One JSON object. ``place`` is ``file:line``; the object ends at byte ``end`` of the file."""

    place: str
    value: JsonObject
    line: int = 0
    end: int = 0


def read_documents(path: Path, *, skip_bytes: int = 0, skip_lines: int = 0) -> Iterator[Document]:
    """Yield the file's objects in order. Lines are streamed.

    With ``skip_bytes`` begin behind them, and behind as many lines as were read before.

    Raises:
        ImportFileError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ImportFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        first = not skip_bytes
        end = file.seek(skip_bytes)
        for number, text in enumerate(file, start=skip_lines + 1):
            end += len(text)
            if not text.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield Document(place, msgspec.json.decode(text, type=JsonObject), number, end)
            except _MALFORMED as error:
                if not first:
                    raise ImportFileError(f"{place}: not a JSON object: {error}") from error
                rest = file.read()
                yield from _one_document(place, text + rest, number, end + len(rest))
            first = False


def _one_document(place: str, text: bytes, line: int, end: int) -> list[Document]:
    try:
        value = msgspec.json.decode(text, type=JsonObject | list[JsonObject])
    except _MALFORMED as error:
        raise ImportFileError(f"{place}: not a JSON object: {error}") from error
    if isinstance(value, dict):
        return [Document(place, value, line, end)]
    return [Document(f"{place}[{index}]", item, line, end) for index, item in enumerate(value)]


def role_of(place: str, message: object) -> str:
    """Return the message's role. OpenAI's ``developer`` becomes ``system``.

    Raises:
        ImportFileError: the role is missing or unknown.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ImportFileError(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    return "system" if role == "developer" else str(role)


def chat_message(place: str, message: Mapping[str, object]) -> Message:
    """Return OpenAI's message with its content as text, its tool calls, or the call it answers.

    Raises:
        ImportFileError: the message holds anything else.
    """
    if message.get("function_call"):
        refuse_tool_call(place)
    content, calls = message.get("content"), message.get("tool_calls")
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
    if calls and convert(place, calls, list[JsonObject]) and content is None:
        return {"role": role_of(place, message), "content": None, **kept}
    return {"role": role_of(place, message), "content": parts_text(place, content), **kept}


def parts_text(place: str, content: object) -> str:
    """Return a string, or the joined ``{"type": "text", "text" | "content": ...}`` parts of a list.

    Raises:
        ImportFileError: a part is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ImportFileError(f"{place}: content {content!r:.80} is not text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("tool_call", "tool_use", "function_call"):
            refuse_tool_call(place)
        text = part.get("text", part.get("content")) if kind == "text" else None
        if not isinstance(text, str):
            raise ImportFileError(f"{place}: a part of type {kind!r} is not text")
        texts.append(text)
    return "".join(texts)


def refuse_tool_call(place: str) -> NoReturn:
    """Raise the error for a tool call.

    Raises:
        ImportFileError: always.
    """
    raise ImportFileError(
        f"{place}: a tool call of this format cannot be imported: convert it to ATIF or OpenAI's"
        " tool_calls, or leave such messages out"
    )


def unknown_action() -> JsonObject:
    """Return the action of a step of which only the reply is known."""
    return {"actionType": RESPONSE, "success": True, "parameters": {}}


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exact tokens of a call, and the policy that sampled them. ``tools`` are in the prompt.

    ``logprobs`` ``[T]``: natural logarithms under the sampled distribution, one for each of the T
    completion tokens.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    route_version: int = 0
    finish_reason: str = "stop"
    seed: int | None = None
    tools: tuple[JsonObject, ...] = ()


class TraceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One observation, its calls, and the action. ``at`` is None if the trace gives no time.

    ``tokens`` maps the position of a call to its exact tokens; the trainer retokenizes the other
    calls. ``action`` and ``state`` have the game's own keys.
    """

    calls: tuple[LlmCall, ...]
    tokens: dict[int, Tokens] = {}
    at: datetime | None = None
    action: JsonObject = msgspec.field(default_factory=unknown_action)
    state: JsonObject = {}
    reward: float = 0.0


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agent's ordered steps. Times are UTC; P&L and balance are in USD."""

    trajectory_id: str
    agent_id: str
    steps: tuple[TraceStep, ...]
    window_id: str | None = None
    scenario_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    final_balance: float | None = None
    final_pnl: float | None = None
    status: str = "completed"
    place: str = ""  # file and line of the trace


def fields_of(record: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the record's fields that ``kind`` also has."""
    names = kind.__struct_fields__
    return {name: getattr(record, name) for name in record.__struct_fields__ if name in names}


def check_tokens(place: str, tokens: Tokens) -> Tokens:
    """Return the tokens if there are prompt tokens and one logprob for each completion token.

    Raises:
        ImportFileError: the lists are empty or differ in length.
    """
    sampled, given = len(tokens.completion_token_ids), len(tokens.logprobs)
    if not sampled or not tokens.prompt_token_ids or sampled != given:
        raise ImportFileError(
            f"{place}: {len(tokens.prompt_token_ids)} prompt tokens, {sampled} completion tokens"
            f" and {given} logprobs: give one logprob for each completion token, or leave out all"
            " three, so that the text is tokenized again"
        )
    return tokens


def convert(place: str, value: object, kind: type[T]) -> T:
    """Return a decoded JSON value as a record.

    Raises:
        ImportFileError: the value has another shape. The message names the place.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ImportFileError(f"{place}: {error}") from error


def utc(place: str, moment: datetime | None) -> datetime | None:
    """Return the moment in UTC. A time without a zone counts as UTC, as in the game's tables.

    Raises:
        ImportFileError: the year is outside the range of windows.
    """
    if moment is None:
        return None
    if not FIRST_YEAR < moment.year < LAST_YEAR:
        raise ImportFileError(f"{place}: time {moment} is not between {FIRST_YEAR} and {LAST_YEAR}")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
