"""Writer of ATIF: one trace becomes one document."""

from typing import Literal

import msgspec

from babylon.core.trajectories import Message
from babylon.formats.atif import (
    OURS,
    VERSION,
    Atif,
    AtifAgent,
    AtifMetrics,
    AtifStep,
    MetricsExtra,
    StepExtra,
    TrajectoryExtra,
)
from babylon.formats.documents import JsonObject
from babylon.formats.trace import Trace, TraceCall, TraceStep

_SOURCES: dict[str, Literal["system", "user", "agent"]] = {
    "system": "system",
    "user": "user",
    "assistant": "agent",
}


def write_atif(trace: Trace) -> JsonObject:
    """Return one document. A call that continues the conversation adds only its new messages."""
    steps: list[AtifStep] = []
    said: tuple[Message, ...] = ()  # the conversation so far, from step id ``begin``
    begin = 1
    for number, step in enumerate(trace.steps):
        for index, call in enumerate(step.calls):
            if not said or call.messages[: len(said)] != said:
                begin, said = len(steps) + 1, ()
            for message in call.messages[len(said) :]:
                steps.append(_context(len(steps) + 1, message, step))
            last = index == len(step.calls) - 1
            steps.append(_reply(len(steps) + 1, number, begin, call, step, last))
            said = (*call.messages, Message(role="assistant", content=call.response))
        if not step.calls:
            steps.append(_act_without_call(len(steps) + 1, number, step))
    atif = Atif(
        schema_version=VERSION,
        session_id=trace.trajectory_id,
        trajectory_id=trace.trajectory_id,
        agent=AtifAgent(name=trace.agent_id, version="unknown", model_name=_model(trace)),
        steps=tuple(steps),
        final_metrics=_totals(trace),
        extra=_ours(_trajectory_extra(trace)),
    )
    document: JsonObject = msgspec.to_builtins(atif)
    return document


def _context(step_id: int, message: Message, step: TraceStep) -> AtifStep:
    source = _SOURCES.get(message.role)
    agent = source == "agent"
    return AtifStep(
        step_id=step_id,
        source=source or "user",
        message=message.content,
        timestamp=step.at,
        llm_call_count=0 if agent else None,
        is_copied_context=True if agent else None,
        extra=None if source else _ours(StepExtra(role=message.role)),
    )


def _reply(
    step_id: int, number: int, begin: int, call: TraceCall, step: TraceStep, last: bool
) -> AtifStep:
    extra = StepExtra(
        step=number,
        prompt_from=begin,
        temperature=call.temperature,
        top_p=call.top_p,
        max_tokens=call.max_tokens,
        purpose=call.purpose,
        action_type=call.action_type,
        latency_ms=call.latency_ms,
    )
    return AtifStep(
        step_id=step_id,
        source="agent",
        message=call.response,
        timestamp=step.at,
        model_name=call.model,
        reasoning_content=call.reasoning,
        metrics=_metrics(call),
        llm_call_count=1,
        extra=_ours(_with_action(extra, step) if last else extra),
    )


def _act_without_call(step_id: int, number: int, step: TraceStep) -> AtifStep:
    return AtifStep(
        step_id=step_id,
        source="agent",
        message="",
        timestamp=step.at,
        llm_call_count=0,
        extra=_ours(_with_action(StepExtra(step=number), step)),
    )


def _with_action(extra: StepExtra, step: TraceStep) -> StepExtra:
    return msgspec.structs.replace(extra, action=step.action, state=step.state, reward=step.reward)


def _metrics(call: TraceCall) -> AtifMetrics | None:
    tokens = call.tokens
    if tokens is None:
        known = (call.prompt_tokens, call.completion_tokens)
        return (
            None
            if known == (None, None)
            else AtifMetrics(prompt_tokens=known[0], completion_tokens=known[1])
        )
    return AtifMetrics(
        prompt_tokens=len(tokens.prompt_token_ids),
        completion_tokens=len(tokens.completion_token_ids),
        prompt_token_ids=tokens.prompt_token_ids,
        completion_token_ids=tokens.completion_token_ids,
        logprobs=tokens.logprobs,
        extra=_ours(
            MetricsExtra(
                policy_version=tokens.policy_version,
                route_version=tokens.route_version,
                finish_reason=tokens.finish_reason,
                seed=tokens.seed,
            )
        ),
    )


def _trajectory_extra(trace: Trace) -> TrajectoryExtra:
    return TrajectoryExtra(
        window_id=trace.window_id,
        scenario_id=trace.scenario_id,
        start=trace.start,
        end=trace.end,
        final_balance=trace.final_balance,
        final_pnl=trace.final_pnl,
        status=trace.status,
    )


def _totals(trace: Trace) -> JsonObject:
    metrics = [_metrics(call) for step in trace.steps for call in step.calls]
    known = [one for one in metrics if one is not None]
    return {
        "total_prompt_tokens": sum(one.prompt_tokens or 0 for one in known),
        "total_completion_tokens": sum(one.completion_tokens or 0 for one in known),
        "total_steps": len(trace.steps),
    }


def _model(trace: Trace) -> str | None:
    return next((call.model for step in trace.steps for call in step.calls), None)


def _ours(extra: msgspec.Struct) -> JsonObject:
    return {OURS: msgspec.to_builtins(extra)}
