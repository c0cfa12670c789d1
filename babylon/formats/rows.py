"""A trace as the game's rows, and as recorded calls where its tokens are known.

A trace tells less than the game asks for. What it does not tell is the neutral value of its
column: P&L, balance and reward 0, no open positions, the action ``RESPONSE``. Without times it
lies at the start of the window that the importer names, one step a second.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from babylon.core.errors import RecorderError
from babylon.core.text import storable, storable_json
from babylon.core.windows import Window, window_at
from babylon.formats.documents import ImportFileError
from babylon.formats.trace import Trace, TraceCall, TraceStep, convert
from babylon.recorder.records import Action, LlmCall, encode_step
from babylon.recorder.rows import Played, Row, call_row, trajectory_row
from babylon.store.calls import RecordedCall

_UNKNOWN_STATE = {"agentBalance": 0.0, "agentPnL": 0.0, "openPositions": 0}
_STEP = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """What one trace is written as."""

    trajectory: Row
    logs: list[Row]
    calls: list[RecordedCall]


def trace_rows(trace: Trace, *, minutes: int, window: Window | None, now: datetime) -> TraceRows:
    """The rows of a trace; ``window`` is where a trace without times goes.

    Raises:
        ImportFileError: the trace has no time and there is no window, or a value cannot be stored.
    """
    start = _start(trace, window)
    own = window_at(start, minutes)
    if trace.window_id not in (None, own.id):
        raise ImportFileError(
            f"{trace.place}: trajectory {trace.trajectory_id!r} started"
            f" {start:%Y-%m-%dT%H:%M:%S}, which is not in its window {trace.window_id}: set"
            f" WINDOW_MINUTES, now {minutes}, to the length of that window"
        )
    played = Played(
        trace.trajectory_id, trace.agent_id, trace.scenario_id or own.id, own, start, start
    )
    calls: list[RecordedCall] = []
    try:
        for step in trace.steps:
            calls += _play(trace.place, played, step)
        row = trajectory_row(
            played,
            end=max(trace.end or played.last, played.last),
            now=now,
            final={"finalBalance": trace.final_balance, "finalPnL": trace.final_pnl},
            status=trace.status,
            knowledge={},
        )
    except RecorderError as error:
        raise ImportFileError(f"{trace.place}: {error}") from error
    return TraceRows(trajectory=row, logs=played.calls, calls=calls)


def _start(trace: Trace, window: Window | None) -> datetime:
    start = trace.start or next((step.at for step in trace.steps if step.at), None)
    if start is not None:
        return start
    if window is None:
        raise ImportFileError(
            f"{trace.place}: trajectory {trace.trajectory_id!r} has no time: pass --window ID"
        )
    return window.start


def _play(place: str, played: Played, step: TraceStep) -> list[RecordedCall]:
    """Add a step as the recorder does; returns its calls with known tokens."""
    number = len(played.steps)
    moment = step.at or (played.last + _STEP if number else played.start)
    action: Action = convert(place, step.action, Action)
    llm_calls = [_llm_call(call) for call in step.calls]
    state = {**_UNKNOWN_STATE, **step.state}
    played.steps.append(encode_step(number, moment, state, (), llm_calls, action, step.reward))
    played.last = max(played.last, moment)
    played.total_reward += step.reward
    played.counts["errors"] += not action.success
    played.counts["trades"] += action.success and action.is_trade
    played.counts["posts"] += action.success and action.action_type == "CREATE_POST"
    recorded = []
    for index, (call, llm_call) in enumerate(zip(step.calls, llm_calls, strict=True)):
        played.calls.append(call_row(played, number, index, llm_call, moment))
        if call.tokens is not None:
            call_id = f"{played.trajectory_id}-call-{number}-{index}"
            recorded.append(_recorded(played, number, call_id, call, moment))
    return recorded


def _llm_call(call: TraceCall) -> LlmCall:
    """System and user prompt are the first of their kind; all messages go into the log."""
    first = {message.role: message.content for message in reversed(call.messages)}
    tokens = call.tokens
    return LlmCall(
        model=call.model,
        model_version=None if tokens is None else str(tokens.policy_version),
        system_prompt=first.get("system", ""),
        user_prompt=first.get("user", ""),
        response=call.response,
        temperature=call.temperature,
        max_tokens=call.max_tokens,
        purpose=call.purpose,
        reasoning=call.reasoning,
        latency_ms=call.latency_ms,
        action_type=call.action_type,
        messages=tuple({"role": m.role, "content": m.content} for m in call.messages),
        top_p=call.top_p,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
    )


def _recorded(
    played: Played, number: int, call_id: str, call: TraceCall, moment: datetime
) -> RecordedCall:
    tokens = call.tokens
    assert tokens is not None
    return RecordedCall(
        call_id=call_id,
        agent_id=played.agent_id,
        trajectory_id=played.trajectory_id,
        step_number=number,
        policy_version=tokens.policy_version,
        route_version=tokens.route_version,
        model=call.model,
        messages=storable_json(msgspec.json.encode(call.messages).decode()),
        response=storable(call.response),
        prompt_token_ids=list(tokens.prompt_token_ids),
        completion_token_ids=list(tokens.completion_token_ids),
        logprobs=list(tokens.logprobs),
        temperature=call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        max_tokens=call.max_tokens,
        seed=tokens.seed,
        finish_reason=tokens.finish_reason,
        trainable=True,
        untrainable_reason=None,
        started_at=moment,
        latency_ms=call.latency_ms or 0,
    )
