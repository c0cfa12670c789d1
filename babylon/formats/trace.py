"""A trajectory between formats: every format is read into a ``Trace`` and written from one.

A trace holds no ground truth, because it is trained on and given to other people.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from babylon.core.errors import DatabaseError
from babylon.core.llm_calls import JsonObject, LlmCall
from babylon.core.windows import FIRST_YEAR, LAST_YEAR

T = TypeVar("T")
_BOM = b"\xef\xbb\xbf"  # some programs begin a file with it
RESPONSE = "RESPONSE"  # action type of a step whose action is unknown
ROLES = ("system", "developer", "user", "assistant", "tool")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ImportFileError(DatabaseError):
    """A file, or an item of it, that cannot be imported. The message names its place."""


LeaveOut = Callable[[ImportFileError], None]
"""Decides about an item that cannot be read: raise its error, or note it and go on without it."""


def refuse(error: ImportFileError) -> None:
    """Refuse the whole file for one item.

    Raises:
        ImportFileError: always.
    """
    raise error


@dataclass(frozen=True, slots=True)
class Document:
    """One JSON object. ``place`` is ``file:line``; the object ends at byte ``end`` of the file."""

    place: str
    value: JsonObject
    line: int = 0
    end: int = 0


def read_documents(
    path: Path, *, skip_bytes: int = 0, skip_lines: int = 0, leave_out: LeaveOut = refuse
) -> Iterator[Document]:
    """Yield the file's objects in order. Lines are streamed.

    With ``skip_bytes`` begin behind them, and behind as many lines as were read before.

    Raises:
        ImportFileError: the file cannot be read; or a line is not a JSON object, unless
            ``leave_out`` goes on.
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
            if number == 1:
                text = text.removeprefix(_BOM)
            if not text.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield Document(place, msgspec.json.decode(text, type=JsonObject), number, end)
            except _MALFORMED as error:
                rest = file.read() if first else b""
                found = _whole(text + rest) if first else None
                if isinstance(found, dict):
                    yield Document(place, found, number, end + len(rest))
                    return
                if isinstance(found, list):
                    yield from _items(place, found, number, end + len(rest), leave_out)
                    return
                leave_out(ImportFileError(f"{place}: not a JSON object: {error}"))
                if first:  # the lines behind a broken one may be sound
                    file.seek(end)
            first = False


def _whole(text: bytes) -> object:
    """Return the one document of a file over many lines, None if the text holds none."""
    try:
        return msgspec.json.decode(text)
    except _MALFORMED:
        return None


def _items(
    place: str, items: list[object], line: int, end: int, leave_out: LeaveOut
) -> Iterator[Document]:
    for index, item in enumerate(items):
        if isinstance(item, dict):
            yield Document(f"{place}[{index}]", item, line, end)
        else:
            leave_out(ImportFileError(f"{place}: not a JSON object: item {index} is {item!r:.80}"))


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
        text = part.get("text", part.get("content")) if kind == "text" else None
        if not isinstance(text, str):
            raise ImportFileError(f"{place}: a part of type {kind!r} is not text")
        texts.append(text)
    return "".join(texts)


def unknown_action() -> JsonObject:
    """Return the action of a step of which only the reply is known."""
    return {"actionType": RESPONSE, "success": True, "parameters": {}}


def recorded_action(action: JsonObject) -> JsonObject:
    """Return a game's action as the recorder writes it, so that an import takes it.

    Parameters that are no object are one value; an error or reasoning that is no text becomes JSON.
    """
    given = action.get("parameters")
    parameters = given if isinstance(given, dict) else {} if given is None else {"value": given}
    texts = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name in ("error", "reasoning")
        if (value := action.get(name)) is not None
    }
    kept = {name: value for name, value in action.items() if name not in ("error", "reasoning")}
    return {**kept, "parameters": parameters, **texts}


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exact tokens of a call, and the policy that sampled them. ``tools`` are in the prompt.

    ``logprobs`` ``[T]``: natural logarithms under the sampled distribution, one for each of the T
    completion tokens. ``untrainable``: why the reply must not be trained on; it has no tokens then.
    """

    prompt_token_ids: tuple[int, ...] = ()
    completion_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_version: int
    untrainable: str | None = None
    route_version: int = 0
    finish_reason: str = "stop"
    seed: int | None = None
    tools: tuple[JsonObject, ...] = ()


class TraceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One observation, its calls, and the action. ``at`` is None if the trace gives no time.

    ``tokens`` maps the position of a call to its exact tokens, or to the reason why it must not be
    trained on; the trainer retokenizes the other calls. ``action`` and ``state`` have the game's
    own keys.
    """

    calls: tuple[LlmCall, ...]
    tokens: dict[int, Tokens] = {}
    at: datetime | None = None
    action: JsonObject = msgspec.field(default_factory=unknown_action)
    state: JsonObject = {}
    reward: float = 0.0

    def untrainable(self, index: int) -> str | None:
        """Return why the reply at this position must not be trained on, None if it may be."""
        known = self.tokens.get(index)
        return None if known is None else known.untrainable


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
