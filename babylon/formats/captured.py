"""Model calls that another system captured, and the trajectories that they form."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, cast

import msgspec

from babylon.core.llm_calls import JsonObject, LlmCall, Message, content_text
from babylon.formats.trace import ImportFileError, Trace, TraceStep, convert


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """One call of a model. Calls of the same ``conversation`` form a trajectory.

    ``part_of`` names what else may have been scored: the call's trace and session.
    """

    place: str
    call_id: str
    conversation: str
    agent: str | None
    start: datetime
    end: datetime
    call: LlmCall
    part_of: tuple[str, ...] = ()
    reward: float = 0.0


def llm_call(
    place: str,
    prompt: Iterable[Message],
    reply: Message,
    sampling: Mapping[str, object],
    start: datetime,
    end: datetime,
) -> LlmCall:
    """Return a call from its messages. ``sampling``: fields of ``LlmCall``, None if unknown.

    Raises:
        ImportFileError: the reply is no assistant's, or a field has another type.
    """
    if reply["role"] != "assistant":
        raise ImportFileError(f"{place}: the output is a message of role {reply['role']!r}")
    known: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    call = LlmCall.of_messages(
        prompt,
        response=content_text(reply),
        tool_calls=cast(list[JsonObject], reply.get("tool_calls")),
        reasoning=reply.get("reasoning"),
        latency_ms=max(0, round((end - start).total_seconds() * 1000)),
        **known,
    )
    return convert(place, msgspec.to_builtins(call), LlmCall)  # checks the types


def captured_traces(calls: Iterable[CapturedCall], agent_id: str) -> Iterator[Trace]:
    """Yield the conversations. Their calls are ordered by start; the first one names the agent."""
    groups: dict[str, list[CapturedCall]] = {}
    for call in calls:
        groups.setdefault(call.conversation, []).append(call)
    for name, group in groups.items():
        group.sort(key=lambda call: (call.start, call.call_id))
        first = group[0]
        yield Trace(
            trajectory_id=name,
            agent_id=first.agent or agent_id,
            steps=tuple(
                TraceStep(calls=(one.call,), at=one.start, reward=one.reward) for one in group
            ),
            start=first.start,
            end=max(call.end for call in group),
            place=first.place,
        )


def number(value: object) -> float | None:
    """Return a finite number that may be written as text, None if it is none."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):
            found = float(value)
            return found if math.isfinite(found) else None
    return None


def whole(value: float | None) -> int | None:
    """Return the number as an integer."""
    return None if value is None else round(value)


def moment(place: str, name: str, value: object) -> datetime:
    """Return an ISO 8601 time in UTC; one without a zone counts as UTC.

    Raises:
        ImportFileError: it is not a time.
    """
    if isinstance(value, str):
        with suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(value)
            return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    raise ImportFileError(f"{place}: {name} {value!r:.80} is not an ISO 8601 time")


class CapturedScores:
    """Scores that other systems gave to a call, a trace or a session, by its name."""

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = {}

    def add(self, owner: str, score: float) -> None:
        self._scores.setdefault(owner, []).append(score)

    def given_to(self, calls: Iterable[CapturedCall]) -> list[CapturedCall]:
        """Return the calls by start with their rewards: the mean of their scores, 0 without any.

        The last call of a trace or session takes that one's scores too: they judge how it ended.
        """
        ordered = sorted(calls, key=lambda call: (call.start, call.call_id))
        last = {owner: call.call_id for call in ordered for owner in call.part_of}
        return [
            replace(call, reward=self._mean([call.call_id, *_ended(call, last)]))
            for call in ordered
        ]

    def _mean(self, owners: Iterable[str]) -> float:
        scores = [score for owner in owners for score in self._scores.get(owner, ())]
        return fmean(scores) if scores else 0.0


def _ended(call: CapturedCall, last: Mapping[str, str]) -> list[str]:
    return [owner for owner in call.part_of if last[owner] == call.call_id]
