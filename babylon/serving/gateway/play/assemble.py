"""A finished trajectory from its events and its recorded calls, as the recorder writes it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from babylon.core.errors import WindowError
from babylon.core.llm_calls import LlmCall, Message
from babylon.core.windows import window_at
from babylon.recorder.trajectory import Action, OpenTrajectory, Row, trajectory_row
from babylon.serving.gateway.play.events import ElsewhereCall, FinishEvent, StepAction, StepEvent
from babylon.serving.gateway.recording_rules import UNRECORDED
from babylon.serving.openai_wire import RequestError
from babylon.store.plays import PlayedCall, StoredPlay

LONGEST_AFTER = timedelta(days=1)
TimedStep = tuple[datetime, StepEvent]
RESPONSE = StepAction()  # the action of a step that is nothing but a call


class _Elsewhere(msgspec.Struct):
    """A call elsewhere, whose fields are skipped."""


class _StepCalls(msgspec.Struct):
    """The calls of a stored step; all else is skipped."""

    calls: list[str | _Elsewhere] = []


def call_ids(steps: Sequence[tuple[datetime, str]]) -> list[list[str]]:
    """Return the ids of calls that each stored step names, without reading the rest of it."""
    decode = msgspec.json.Decoder(_StepCalls).decode
    return [[one for one in decode(step).calls if isinstance(one, str)] for _, step in steps]


def open_play(play: StoredPlay) -> OpenTrajectory:
    """Return a started trajectory as the recorder's, without its steps."""
    assert play.agent_id and play.scenario_id and play.started_at and play.minutes
    window = window_at(play.started_at, play.minutes)
    return OpenTrajectory(
        play.trajectory_id,
        play.agent_id,
        play.scenario_id,
        window,
        play.started_at,
        play.started_at,
    )


def finished_row(played: OpenTrajectory, event: FinishEvent) -> Row:
    """Return the row of the game's table. It ends now, or with its last step in a past window.

    Raises:
        WindowError: the given end is not within a day of the window.
    """
    now = datetime.now(UTC)
    end = event.at or (now if now < played.window.end else played.last)
    if end > played.window.end + LONGEST_AFTER:
        raise WindowError(
            f"a finish at {end.isoformat()} is over a day after window {played.window.id}:"
            " send the time of the last step"
        )
    return trajectory_row(
        played,
        end=max(end, played.last),
        now=now,
        final={"finalBalance": event.final_balance, "finalPnL": event.final_pnl},
        status=event.status,
        knowledge=event.knowledge,
    )


def add_steps(
    played: OpenTrajectory,
    steps: Sequence[TimedStep],
    records: Sequence[PlayedCall],
    lost: Collection[str] = (),
) -> tuple[int, int]:
    """Add the steps with their calls to ``played``.

    A step has the calls that it is the first to name, then those that named it. Without any step,
    calls that named one step make one, and each other call makes one of its own. ``lost`` calls may
    be named too.

    Returns:
        The number of recorded calls in the steps, and of calls that were kept out of the records.

    Raises:
        RequestError: 409, a step is missing, or names a call that is not recorded.
        RecorderError: a step cannot be stored.
    """
    for index, (_, step) in enumerate(steps):
        if step.number != index:
            raise RequestError(409, f"step {index} is missing: send it", code="missing_step")
    # An id says more than a header: a call that a step names is in no other step.
    by_id = {record.call_id: record for record in records}
    named = {call for _, step in steps for call in step.calls if isinstance(call, str)}
    unnamed = [record for record in records if record.call_id not in named]
    if not steps:
        for calls in _groups(unnamed):
            _add(played, calls[0].started_at, None, map(_llm_call, calls))
        return len(unnamed), 0
    by_step: defaultdict[int | None, list[PlayedCall]] = defaultdict(list)
    for record in unnamed:
        by_step[record.step_number].append(record)
    told: set[str] = set()  # a program that never empties its list of ids names them again
    found = unrecorded = 0
    for at, step in steps:
        own = [_named(step, call, by_id, lost) for call in _new(step.calls, told)]
        own += map(_llm_call, by_step[step.number])
        ids = [call.call_id for call in own if call.call_id is not None]
        found += sum(one in by_id for one in ids)
        unrecorded += sum(one not in by_id for one in ids)
        _add(played, at, step, own)
    return found, unrecorded


def action_of(given: StepAction) -> Action:
    """Return the recorder's action."""
    return Action(**given.model_dump())


def llm_call_elsewhere(call: ElsewhereCall) -> LlmCall:
    """Return the recorder's call."""
    return LlmCall.of_messages(
        call.messages,
        response=call.response,
        model=call.model,
        temperature=call.temperature,
        purpose=call.purpose,
        tool_calls=call.tool_calls,
    )


def _add(
    played: OpenTrajectory, at: datetime, step: StepEvent | None, calls: Iterable[LlmCall]
) -> None:
    played.add_step(
        max(at, played.last),
        step.state if step else {},
        list(calls),
        action_of(step.action if step else RESPONSE),
        step.reward or 0.0 if step else 0.0,
    )


def _groups(records: Sequence[PlayedCall]) -> Iterable[list[PlayedCall]]:
    groups: dict[object, list[PlayedCall]] = {}
    for record in records:
        key = record.call_id if record.step_number is None else record.step_number
        groups.setdefault(key, []).append(record)
    return groups.values()


def _new(calls: Iterable[str | ElsewhereCall], told: set[str]) -> Iterator[str | ElsewhereCall]:
    """Yield the calls without the ids in ``told``, and add the others' ids to it."""
    for call in calls:
        if isinstance(call, str):
            if call in told:
                continue
            told.add(call)
        yield call


def _named(
    step: StepEvent,
    call: str | ElsewhereCall,
    by_id: Mapping[str, PlayedCall],
    lost: Collection[str],
) -> LlmCall:
    if isinstance(call, ElsewhereCall):
        return llm_call_elsewhere(call)
    if call in by_id:
        return _llm_call(by_id[call])
    if not call.startswith(UNRECORDED) and call not in lost:
        raise RequestError(
            409,
            f"step {step.number} names call {call!r:.80}, which is not recorded for this key:"
            " send the id of the gateway's answer, and see `babylon calls rules`",
            code="unknown_call",
        )
    # Nothing is known of it. The purpose keeps it out of training and from the judge.
    return LlmCall.of_messages(
        [], response="", call_id=call, model="unrecorded", purpose="evaluation"
    )


def _llm_call(record: PlayedCall) -> LlmCall:
    return LlmCall.of_messages(
        sent_messages(record.messages),
        response=record.response,
        call_id=record.call_id,
        model=record.model,
        model_version=str(record.policy_version),
        temperature=record.temperature,
        top_p=record.top_p,
        max_tokens=record.max_tokens,
        latency_ms=record.latency_ms,
    )


def sent_messages(text: str) -> list[Message]:
    """Return the recorded prompt as messages; a completion's prompt is the user's."""
    sent = msgspec.json.decode(text)
    if isinstance(sent, list):
        return [one for one in sent if isinstance(one, dict)]
    return [{"role": "user", "content": str(sent.get("prompt"))}]
