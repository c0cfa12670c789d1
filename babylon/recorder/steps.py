"""The parts of a step, and their JSON: camelCase keys without null values, as the game writes."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from babylon.core.errors import RecorderError
from babylon.core.text import storable_json

_REQUIRED_STATE = ("agentBalance", "agentPnL", "openPositions")
# Fields of a call that its log row stores and ``stepsJson`` does not.
_LOG_ONLY = ("messages", "topP", "promptTokens", "completionTokens")


class LlmCall(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One chat request inside a step.

    ``messages`` holds the whole prompt if it was more than one system and one user message.
    ``model_version`` is the version of the policy that answered.
    """

    model: str
    system_prompt: str
    user_prompt: str
    response: str
    temperature: float
    max_tokens: int
    purpose: Literal["action", "reasoning", "evaluation", "response"]
    model_version: str | None = None
    reasoning: str | None = None
    latency_ms: int | None = None
    action_type: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    top_p: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ProviderAccess(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Data that the agent read from a provider."""

    provider_name: str
    data: Mapping[str, object]
    purpose: str


class Action(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An action and its result.

    ``correctness`` has the game's own keys, for example ``{"predictionCorrect": True}``.
    """

    action_type: str
    success: bool
    parameters: Mapping[str, object]
    result: object = None
    error: str | None = None
    reasoning: str | None = None
    correctness: Mapping[str, object] | None = None

    @property
    def is_trade(self) -> bool:
        return self.action_type.startswith(("BUY", "SELL", "OPEN", "CLOSE"))


def encode_step(
    number: int,
    at: datetime,
    environment_state: Mapping[str, object],
    provider_accesses: Sequence[ProviderAccess],
    llm_calls: Sequence[LlmCall],
    action: Action,
    reward: float,
) -> str:
    """Return one element of ``stepsJson``.

    Raises:
        RecorderError: the state lacks a key, or JSON or Postgres cannot hold a value.
    """
    missing = [key for key in _REQUIRED_STATE if key not in environment_state]
    if missing:
        raise RecorderError(
            f"step {number}: environment_state lacks {', '.join(missing)}:"
            f" it has {', '.join(environment_state) or 'no keys'}"
        )
    return to_json(
        {
            "stepNumber": number,
            "timestamp": milliseconds(at),
            "environmentState": dict(environment_state),
            "providerAccesses": msgspec.to_builtins(list(provider_accesses)),
            "llmCalls": [_step_call(call) for call in llm_calls],
            "action": msgspec.to_builtins(action),
            "reward": reward,
        },
        f"step {number}",
    )


def to_json(value: object, what: str) -> str:
    """Return compact JSON as JavaScript writes it, with NUL characters replaced.

    Raises:
        RecorderError: the value holds NaN, infinity, half a surrogate pair, or a foreign type.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError) as error:
        raise RecorderError(f"{what} cannot be stored as JSON: {error}") from error
    return storable_json(text)


def milliseconds(at: datetime) -> int:
    """Return milliseconds since 1970, UTC."""
    return round(at.timestamp() * 1000)


def game_time(at: datetime) -> datetime:
    """Return the time as the game's columns hold it: UTC without a zone."""
    return at.astimezone(UTC).replace(tzinfo=None)


def _step_call(call: LlmCall) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(call)
    return {name: value for name, value in fields.items() if name not in _LOG_ONLY}
