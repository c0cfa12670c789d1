"""A trajectory between formats: what all of them can be read into and written from.

Ground truth has no place here: a trace goes into training text and to strangers.
"""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from babylon.core.trajectories import Message
from babylon.core.windows import FIRST_YEAR, LAST_YEAR
from babylon.formats.documents import ImportFileError

Purpose = Literal["action", "reasoning", "evaluation", "response"]
RESPONSE = "RESPONSE"  # the action of a step of which only the reply is known


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exact tokens of a call, and the policy that sampled them.

    ``logprobs`` ``[T]``: natural log, of the distribution that was sampled from, one for each of
    the T completion tokens.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    route_version: int = 0
    finish_reason: str = "stop"
    seed: int | None = None


class TraceCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLM request. ``tokens`` is None where they are unknown: such a call is retokenized."""

    messages: tuple[Message, ...]
    response: str
    model: str = "unknown"
    temperature: float = 1.0
    top_p: float | None = None
    max_tokens: int = 0
    purpose: Purpose = "action"
    action_type: str | None = None
    reasoning: str | None = None
    latency_ms: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Tokens | None = None


class TraceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One observation, the calls it led to, and the action. ``at`` is None where nobody noted it.

    ``action`` and ``state`` have the game's own keys.
    """

    calls: tuple[TraceCall, ...]
    at: datetime | None = None
    action: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"actionType": RESPONSE, "success": True, "parameters": {}}
    )
    state: dict[str, Any] = {}
    reward: float = 0.0


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agent's ordered steps. Times are UTC; P&L and balance in USD."""

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
    place: str = ""  # the file and line that it was read from


def check_tokens(place: str, tokens: Tokens) -> Tokens:
    """The tokens, if there is one finite logprob for each token that was sampled.

    Raises:
        ImportFileError: there is not.
    """
    sampled, given = len(tokens.completion_token_ids), len(tokens.logprobs)
    if not sampled or not tokens.prompt_token_ids or sampled != given:
        raise ImportFileError(
            f"{place}: {len(tokens.prompt_token_ids)} prompt tokens, {sampled} completion tokens"
            f" and {given} logprobs: give every completion token its logprob, or leave all three"
            " out (the text is tokenized again then)"
        )
    return tokens


def convert(place: str, value: Any, kind: type[Any]) -> Any:
    """A decoded JSON value as a record.

    Raises:
        ImportFileError: it has another shape; the message says where.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ImportFileError(f"{place}: {error}") from error


def utc(place: str, moment: datetime | None) -> datetime | None:
    """In UTC; a time without a zone is taken as UTC, as the game writes it.

    Raises:
        ImportFileError: no window can hold it.
    """
    if moment is None:
        return None
    if not FIRST_YEAR < moment.year < LAST_YEAR:
        raise ImportFileError(f"{place}: time {moment} is not between {FIRST_YEAR} and {LAST_YEAR}")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
