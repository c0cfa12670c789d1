"""The game's JSON as typed records, or the reason and the path why it is none.

Two writers fill these columns: the recorder, and an older one that adds keys (``stepId``,
``done``, ``attemptId``, …). What training reads is required; all other keys may be there or not.

JSON that parses is not yet sound: a duplicate key (one value silently wins), ``\\u0000`` (which
Postgres cannot store) or an integer of more than 64 bits would pass. Text is *plain* when it
re-encodes to itself: then it has none of these faults. Text that is not is read strictly, and
slowly.
"""

import gc
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import orjson

from babylon.quality.reasons import Reason, RejectedError

T = TypeVar("T")

PENDING = "pending"
MAX_DEPTH = 200
POLICY_PURPOSES = frozenset({"action", "reasoning", "response"})

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# gc=False spares the garbage collector: none of these records is part of a cycle.


class EnvironmentState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What the agent saw of itself before it acted. ``agent_pnl`` (USD) is its lifetime P&L."""

    agent_pnl: float = msgspec.field(name="agentPnL")


class LlmCall(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One request; ``purpose`` ``evaluation`` is not the policy's and is never trained. The older
    writer gives each an id of its own."""

    system_prompt: str
    user_prompt: str
    purpose: str
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    call_id: Any = None
    response: str | None = None  # absent or null when the provider failed: Reason.NO_RESPONSE


class Correctness(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Whether a decided trade was right."""

    prediction_correct: bool | None = None
    perp_correct: bool | None = None


class Action(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What the agent did. ``parameters`` and ``result`` are free-form; closed trades carry
    ``pnl`` in the result."""

    action_type: str
    success: bool
    parameters: Any = None
    result: Any = None
    correctness: Correctness | None = None


class Step(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One observation, the calls it led to, and the action taken."""

    step_number: _Count
    environment_state: EnvironmentState
    llm_calls: tuple[LlmCall, ...]
    action: Action


class Metrics(msgspec.Struct, frozen=True, rename="camel"):
    """Of ``metricsJson`` only the final lifetime P&L (USD) is read."""

    final_pnl: float | None = msgspec.field(name="finalPnL", default=None)


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """``game_knowledge`` is ground truth: for the judge, never for the policy."""

    game_knowledge: dict[str, Any] = {}


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Decoded JSON has no cycles, and looking for some takes a third of the time of a check."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plain(text: str) -> Any:
    """The document that the text spells, where that is sound by its spelling alone: compact, as
    JavaScript writes it. Otherwise ``msgspec.UNSET``."""
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeError):
        raw = text.encode()
        document = orjson.loads(raw)
        escaped = b"\\" in raw  # without an escape there is nothing to search for
        if orjson.dumps(document) == raw and not (escaped and _NUL.search(raw)):
            return document
    return msgspec.UNSET


def decode(text: str, kind: type[T], column: str) -> T:
    """A game column as ``kind``.

    Raises:
        RejectedError: malformed JSON, a missing field or a non-finite number; the detail says
            where, for example ``stepsJson[3].action``.
    """
    try:
        document = plain(text)
        if document is msgspec.UNSET:
            document = msgspec.json.decode(text.encode())
            _read_strictly(text)
        return msgspec.convert(document, kind)
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


_NUL = re.compile(rb"\\u0000")  # twice as fast as `in`


def _reject_shape(message: str, column: str) -> NoReturn:
    """Translate msgspec's message, which ends in `` - at `$[0].action` ``, unless at the top."""
    what, _, where = message.partition(" - at ")
    path = column + where.strip("`").removeprefix("$")
    if what.startswith("Object missing required field"):
        raise RejectedError(Reason.MISSING_FIELD, f"{path}.{what.split('`')[1]}")
    null_number = what.endswith("got `null`") and ("`float`" in what or "`int`" in what)
    if null_number or what == "Number out of range":
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"{path}: {what}")
    raise RejectedError(Reason.MALFORMED_JSON, f"{path}: {what}")


def _reject_text(text: str, message: str, column: str) -> NoReturn:
    """Malformed, unless all that is wrong are the words NaN and Infinity."""
    try:
        _read_strictly(text)
    except _FaultError as fault:
        raise RejectedError(fault.reason, f"{column}: {fault}") from fault
    except ValueError:
        pass  # malformed for Python's parser too: msgspec's message has the position
    raise RejectedError(Reason.MALFORMED_JSON, f"{column}: {message}")


class _FaultError(ValueError):
    def __init__(self, message: str, reason: Reason = Reason.MALFORMED_JSON) -> None:
        super().__init__(message)
        self.reason = reason


def _read_strictly(text: str) -> None:
    """Raise on what msgspec lets pass, and on NaN and Infinity by name."""
    _check_tree(_STRICT.decode(text), 0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
