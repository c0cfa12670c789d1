"""A trace as the game's rows, and as recorded calls if its tokens are known.

A trace holds less than the game's rows. Missing fields get neutral values: P&L, balance and reward
0, no open positions, the action ``RESPONSE``. A trace without times starts at the start of the
given window and has one step a second.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from babylon.core.errors import RecorderError
from babylon.core.llm_calls import LlmCall, answer_message
from babylon.core.text import storable, storable_json
from babylon.core.trajectories import Call, TrainingRow
from babylon.core.windows import GAME_MINUTES, Window, id_problem, window_at
from babylon.formats.trace import (
    ImportFileError,
    Tokens,
    Trace,
    TraceStep,
    convert,
    utc,
)
from babylon.recorder.trajectory import (
    MAX_SCENARIO_ID,
    Action,
    OpenTrajectory,
    Row,
    trajectory_row,
)
from babylon.store.calls import RecordedCall

_UNKNOWN_STATE = {"agentBalance": 0.0, "agentPnL": 0.0, "openPositions": 0}
_STEP = timedelta(seconds=1)
_BITS = {"seed": 64, "route_version": 64}  # of integers in Postgres; of others 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The rows of one trace."""

    trajectory: Row
    logs: list[Row]
    calls: list[RecordedCall]


def training_rows_of(traces: Iterable[Trace]) -> list[TrainingRow]:
    """Return one row for each trace, with the policy's calls and no score.

    Token ids are left out: a file does not name the tokenizer that made them, and the model that is
    taught may have another one of the same size.
    """
    return [
        TrainingRow(
            trajectory_id=trace.trajectory_id,
            agent_id=trace.agent_id,
            scenario_id=trace.scenario_id or "",
            score=0.0,
            calls=tuple(
                Call(
                    step=number,
                    messages=call.prompt,
                    response=call.response or "",
                    tool_calls=call.tool_calls or (),
                    untrainable=step.untrainable(index),
                )
                for number, step in enumerate(trace.steps)
                for index, call in enumerate(step.calls)
                if call.purpose != "evaluation"
            ),
        )
        for trace in traces
    ]


def trace_rows(trace: Trace, *, minutes: int, window: Window | None, now: datetime) -> TraceRows:
    """Return the rows of a trace. ``window`` is the window of a trace without times.

    Raises:
        ImportFileError: the trace has no time and no window is given, its window id does not match
            its time, or a value cannot be stored, such as a time of year 1.
    """
    start = _start(trace, window)
    own = window_at(start, minutes)
    # The game names the hour of a row, however long our windows are.
    named = trace.window_id or own.id
    if named != own.id and id_problem(own, named, GAME_MINUTES // 60):
        raise ImportFileError(
            f"{trace.place}: trajectory {trace.trajectory_id!r} started"
            f" {start:%Y-%m-%dT%H:%M:%S}, outside its window {trace.window_id}: set WINDOW_MINUTES"
            f" (now {minutes}) to the length of that window"
        )
    played = OpenTrajectory(
        trace.trajectory_id, trace.agent_id, trace.scenario_id or own.id, own, start, start
    )
    calls: list[RecordedCall] = []
    try:
        for step in trace.steps:
            # The recorder's own checks and encoding: an imported row equals a recorded one.
            calls += _add_step(trace.place, played, step)
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
    _check_columns(trace, played)
    return TraceRows(trajectory=row, logs=played.calls, calls=calls)


def _check_columns(trace: Trace, played: OpenTrajectory) -> None:
    """Refuse what no column holds: as an error of Postgres it would stop the whole import."""
    if len(played.scenario_id) > MAX_SCENARIO_ID:
        raise ImportFileError(
            f"{trace.place}: scenario id {played.scenario_id!r:.80} is longer than"
            f" {MAX_SCENARIO_ID} characters: shorten it"
        )
    counts = [(name, value) for row in played.calls for name, value in row.items()]
    for step in trace.steps:
        for tokens in step.tokens.values():
            ids = (*tokens.prompt_token_ids, *tokens.completion_token_ids)
            counts += [(name, getattr(tokens, name)) for name in ("policy_version", *_BITS)]
            counts += [("token id", one) for one in ids]
    for name, value in counts:
        bits = _BITS.get(name, 32)
        if isinstance(value, int) and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ImportFileError(
                f"{trace.place}: {name} is {value!r:.80}: give a number of at most {bits} bits"
            )


def _start(trace: Trace, window: Window | None) -> datetime:
    start = utc(trace.place, trace.start or next((s.at for s in trace.steps if s.at), None))
    if start is not None:
        return start
    if window is None:
        raise ImportFileError(
            f"{trace.place}: trajectory {trace.trajectory_id!r} has no time: pass --window ID"
        )
    return window.start


def _add_step(place: str, played: OpenTrajectory, step: TraceStep) -> list[RecordedCall]:
    number = len(played.steps)
    moment = step.at or (played.last + _STEP if number else played.start)
    action = convert(place, step.action, Action)
    ids = [f"{played.trajectory_id}-call-{number}-{i}" for i in range(len(step.calls))]
    calls = [_named(call, ids[i], step.tokens.get(i)) for i, call in enumerate(step.calls)]
    played.add_step(moment, {**_UNKNOWN_STATE, **step.state}, calls, action, step.reward)
    return [
        _recorded(
            played,
            number,
            ids[i],
            step.calls[i],
            tokens,
            moment,
        )
        for i, tokens in step.tokens.items()
    ]


def _named(call: LlmCall, call_id: str, tokens: Tokens | None) -> LlmCall:
    """Return the call with the id and the policy of its record, if its tokens are known."""
    if tokens is None:
        return call
    return replace(call, call_id=call_id, model_version=str(tokens.policy_version))


def _recorded(
    played: OpenTrajectory,
    number: int,
    call_id: str,
    call: LlmCall,
    tokens: Tokens,
    moment: datetime,
) -> RecordedCall:
    answer = answer_message(call.response or "", call.tool_calls)
    return RecordedCall(
        call_id=call_id,
        agent_id=played.agent_id,
        trajectory_id=played.trajectory_id,
        step_number=number,
        policy_version=tokens.policy_version,
        route_version=tokens.route_version,
        model=call.model,
        messages=storable_json(msgspec.json.encode(call.prompt).decode()),
        response=storable(call.response or ""),
        answer=storable_json(msgspec.json.encode(answer).decode()) if call.tool_calls else None,
        parameters=storable_json(msgspec.json.encode({"tools": tokens.tools}).decode()),
        prompt_token_ids=list(tokens.prompt_token_ids),
        completion_token_ids=list(tokens.completion_token_ids),
        logprobs=array("f", tokens.logprobs).tolist(),  # Postgres refuses what float4 rounds to 0
        temperature=call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        max_tokens=call.max_tokens,
        seed=tokens.seed,
        finish_reason=tokens.finish_reason,
        trainable=tokens.untrainable is None,
        untrainable_reason=tokens.untrainable,
        started_at=moment,
        latency_ms=call.latency_ms or 0,
    )
