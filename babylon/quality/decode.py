"""Decoder of the game's JSON: typed records, or a rejection with its reason and path.

Two writers fill these columns: the recorder, and an older one that adds keys (``stepId``,
``done``, ``attemptId``, …). The fields that training reads are required. Other keys are ignored.

A JSON parser accepts some unsound text: a duplicate key (one value silently wins), ``\\u0000``
(Postgres cannot store it), or an integer of more than 64 bits. Text is *plain* if it re-encodes to
itself; plain text has none of these faults. Other text is also read by a strict, slow parser.
"""

import gc
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Annotated, NoReturn, TypeVar

import msgspec
import orjson

from babylon.core.errors import reason_of
from babylon.core.llm_calls import LlmCall
from babylon.core.text import is_deeper
from babylon.core.types import Rejection

T = TypeVar("T")


class Reason(StrEnum):
    """Reasons for a rejection in the order of the checks. The first that applies is reported.

    The names are stored, so they must not change.
    """

    OTHER_WINDOW = "other_window"  # its window id contradicts its start
    MALFORMED_JSON = "malformed_json"  # not JSON, or not the game's shape
    MISSING_FIELD = "missing_field"  # a required key is absent; the detail is its path
    NON_FINITE_NUMBER = "non_finite_number"  # NaN or infinity, which JavaScript writes as null
    EMPTY_STEPS = "empty_steps"
    TOO_MANY_CALLS = "too_many_calls"  # the gateway's records of it are too large to be read
    STEP_ORDER = "step_order"  # step numbers do not rise
    UNFINISHED_STEP = "unfinished_step"  # an action is still `pending`
    NO_LLM_CALL = "no_llm_call"  # no step has a call of the policy
    NO_RESPONSE = "no_response"  # a reply of the policy has neither text nor tool calls
    TOO_FEW_ACTIONS = "too_few_actions"
    BELOW_REWARD_THRESHOLD = "below_reward_threshold"  # only if REWARD_THRESHOLD is set
    # found by the judge, stage `score`
    NOT_READABLE = "not_readable"  # it cannot be written down for the judge
    TOO_LONG_FOR_JUDGE = "too_long_for_judge"  # alone it exceeds the judge's context
    JUDGE_REFUSED = "judge_refused"  # a refusal, a content filter, or the server's error 400
    NO_JUDGMENT = "no_judgment"  # no reply about it alone can be used
    NO_FEEDBACK = "no_feedback"  # no reward arrived in time (scorer ``feedback``)


OF_POOR_PLAY = (Reason.NO_RESPONSE, Reason.TOO_FEW_ACTIONS, Reason.BELOW_REWARD_THRESHOLD)
"""Reasons that say how the policy played. The row itself is sound."""


class RejectedError(Exception):
    """A row that cannot be used. ``check_row`` turns it into a rejection."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def rejected(trajectory_id: str, error: Exception) -> Rejection:
    """Return the error as the rejection of the row whose check raised it.

    Raises:
        MemoryError: the machine lacks memory, so the row is not at fault.
    """
    if isinstance(error, MemoryError):
        raise error
    reason, detail = Reason.MALFORMED_JSON, f"its check fails: {reason_of(error)}"
    if isinstance(error, RejectedError):
        reason, detail = error.reason, error.detail
    return Rejection(trajectory_id=trajectory_id, reason=reason, detail=detail[:MAX_DETAIL])


MAX_DETAIL = 300  # characters, because a detail may quote the row
PENDING = "pending"
_READ_OF_CALL = frozenset(
    {"systemPrompt", "userPrompt", "purpose", "temperature", "callId", "response", "toolCalls"}
)
MAX_DEPTH = 200

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# gc=False is safe and saves time: none of these records is part of a reference cycle.


class EnvironmentState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The agent's own state before its action. ``agent_pnl`` (USD) is its lifetime P&L."""

    agent_pnl: float = msgspec.field(name="agentPnL")


class Correctness(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Verdict on a decided trade.

    Of a perpetual: ``price_change`` until its end, in percent, and ``payoff``, the dollars that the
    order adds to the P&L at the end if everything that is open is held until then.
    """

    prediction_correct: bool | None = None
    perp_correct: bool | None = None
    price_change: object = None
    payoff: object = None


class GameAction(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An action. ``parameters`` and ``result`` are free-form; closed trades have ``result.pnl``."""

    action_type: str
    success: bool
    parameters: object = None
    result: object = None
    correctness: Correctness | None = None


class GameStep(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One observation, its calls, and the action."""

    step_number: _Count
    environment_state: EnvironmentState
    llm_calls: tuple[LlmCall, ...]
    action: GameAction


class GameMetrics(msgspec.Struct, frozen=True, rename="camel"):
    """The field of ``metricsJson`` that training reads: the final lifetime P&L (USD)."""

    final_pnl: float | None = msgspec.field(name="finalPnL", default=None)


class GameMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The field of ``metadataJson`` that the judge reads: ground truth, never for the policy."""

    game_knowledge: dict[str, object] = {}


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collection, which takes a third of the time of a check.

    Decoded JSON has no reference cycles to collect.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def decode_plain(text: str) -> object:
    """Return the document if the text is plain: compact, as JavaScript writes it, and sound.

    Return ``msgspec.UNSET`` for any other text.
    """
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeError):
        raw = text.encode()
        document = orjson.loads(raw)
        escaped = b"\\" in raw  # without an escape there is no NUL to search for
        if orjson.dumps(document) == raw and not (escaped and _NUL.search(raw)):
            return document
    return msgspec.UNSET


def decode(text: str, kind: type[T], column: str) -> T:
    """Return a game column as ``kind``.

    The fields of a call that training does not read may have any type, and are dropped then.

    Raises:
        RejectedError: malformed JSON, a missing field or a non-finite number. The detail names the
            place, for example ``stepsJson[3].action``.
    """
    try:
        document = decode_plain(text)
        if document is msgspec.UNSET:
            document = msgspec.json.decode(text.encode())
            _read_strictly(text)
        try:
            return msgspec.convert(document, kind)
        except msgspec.ValidationError:
            return msgspec.convert(without_unread(document), kind)
    except msgspec.ValidationError as error:
        _reject_shape(str(error), column)
    except msgspec.DecodeError as error:
        _reject_text(text, str(error), column)
    except _FaultError as error:
        raise RejectedError(error.reason, f"{column}: {error}") from error
    except RecursionError as error:
        detail = f"{column}: nested more than {MAX_DEPTH} levels deep"
        raise RejectedError(Reason.MALFORMED_JSON, detail) from error
    except UnicodeError as error:
        raise RejectedError(Reason.MALFORMED_JSON, f"{column}: not UTF-8: {error}") from error


def without_unread(document: object) -> object:
    """Remove the fields of the steps' calls that training does not read: they may have any type."""
    for step in document if isinstance(document, list) else ():
        calls = step.get("llmCalls") if isinstance(step, dict) else None
        for call in calls if isinstance(calls, list) else ():
            for name in call.keys() - _READ_OF_CALL if isinstance(call, dict) else ():
                del call[name]
    return document


_NUL = re.compile(rb"\\u0000")  # twice as fast as `in`


def _reject_shape(message: str, column: str) -> NoReturn:
    """Translate msgspec's message, which ends in `` - at `$[0].action` `` below the top level."""
    what, _, where = message.partition(" - at ")
    path = column + where.strip("`").removeprefix("$")
    if what.startswith("Object missing required field"):
        raise RejectedError(Reason.MISSING_FIELD, f"{path}.{what.split('`')[1]}")
    null_number = what.endswith("got `null`") and ("`float`" in what or "`int`" in what)
    if null_number or what == "Number out of range":
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"{path}: {what}")
    raise RejectedError(Reason.MALFORMED_JSON, f"{path}: {what}")


def _reject_text(text: str, message: str, column: str) -> NoReturn:
    try:
        _read_strictly(text)
    except _FaultError as fault:
        raise RejectedError(fault.reason, f"{column}: {fault}") from fault
    except ValueError:
        pass  # Python's parser fails too, but msgspec's message has the position
    raise RejectedError(Reason.MALFORMED_JSON, f"{column}: {message}")


class _FaultError(ValueError):
    def __init__(self, message: str, reason: Reason = Reason.MALFORMED_JSON) -> None:
        super().__init__(message)
        self.reason = reason


def _read_strictly(text: str) -> None:
    """Raise on faults that msgspec accepts, and on NaN and Infinity by name."""
    _check_tree(_STRICT.decode(text), 0)


def is_deep(text: str) -> bool:
    """True if JSON is nested so deep that a later stage, with less stack left, may fail on it."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    return is_deeper(msgspec.json.decode(text), MAX_DEPTH)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _FaultError(f"key {twice!r} occurs twice in one object")
    return unique


def _64_bits(literal: str) -> int:
    if len(literal) > 20 or not -(2**63) <= int(literal) < 2**64:
        raise _FaultError(f"integer {literal[:40]} has more than 64 bits")
    return int(literal)


def _finite(literal: str) -> float:
    if not math.isfinite(value := float(literal)):
        raise _FaultError(f"number {literal[:40]} is not finite", Reason.NON_FINITE_NUMBER)
    return value


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_64_bits, parse_float=_finite, parse_constant=_finite
)


def _check_tree(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _FaultError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        if "\0" in value:
            raise _FaultError(r"a string contains \u0000")
    elif isinstance(value, list):
        for item in value:
            _check_tree(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_tree(key, depth + 1)
            _check_tree(item, depth + 1)
