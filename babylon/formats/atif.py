"""Records of ATIF, the Agent Trajectory Interchange Format (Harbor RFC 0001, version 1.7).

A document is one trajectory: a list of system, user and agent steps that form one conversation.
The prompt of a reply is everything before it. Babylon's agents start a new conversation with every
tick. Therefore our agent steps give the first step of their prompt in
``extra.babylon.prompt_from``, and earlier replies inside a prompt are marked ``is_copied_context``.

``metrics`` carries ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``. RFC 0001 has no
policy version; ours is in ``metrics.extra.babylon``. Ground truth is not written. The reader
ignores unknown keys. The writer omits default values.
"""

from collections.abc import Iterator
from datetime import datetime
from hashlib import blake2b
from itertools import groupby
from typing import Literal, cast

import msgspec
from msgspec.structs import replace

from babylon.core.llm_calls import (
    JsonObject,
    LlmCall,
    Message,
    Purpose,
    answer_message,
    content_text,
)
from babylon.formats.foreign_messages import decoded
from babylon.formats.trace import (
    Document,
    ImportFileError,
    Tokens,
    Trace,
    TraceStep,
    check_tokens,
    convert,
    fields_of,
    parts_text,
    unknown_action,
    utc,
)

VERSION = "ATIF-v1.7"
READABLE = "ATIF-v1."
Source = Literal["system", "user", "agent"]
OURS = "babylon"  # the key in ``extra`` that holds our own fields


class TrajectoryExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``extra.babylon`` of a trajectory."""

    window_id: str | None = None
    scenario_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    final_balance: float | None = None
    final_pnl: float | None = None
    status: str = "completed"


class StepExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``extra.babylon`` of a step.

    ``role`` is set if ``source`` does not give the role, ``message`` if the message holds more than
    a role and a text, or if that is empty: a step without a text is no message by itself.
    """

    role: str | None = None
    message: Message | None = None
    step: int | None = None
    prompt_from: int = 1
    temperature: float = 1.0
    top_p: float | None = None
    max_tokens: int = 0
    purpose: Purpose = "action"
    action_type: str | None = None
    latency_ms: int | None = None
    action: JsonObject | None = None
    state: JsonObject = {}
    reward: float = 0.0


class MetricsExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``metrics.extra.babylon``: the policy that sampled the tokens.

    ``untrainable``: why the reply must not be trained on; such a reply has no tokens.
    """

    policy_version: int | None = None
    untrainable: str | None = None
    route_version: int = 0
    finish_reason: str = "stop"
    seed: int | None = None
    tools: tuple[JsonObject, ...] = ()


class AtifMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: JsonObject | None = None


class AtifToolCall(msgspec.Struct, frozen=True, kw_only=True):
    tool_call_id: str
    function_name: str
    arguments: JsonObject


class AtifAgent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    version: str
    model_name: str | None = None


class AtifStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step_id: int
    source: Source
    message: str | list[JsonObject]
    timestamp: datetime | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: JsonObject | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: JsonObject | None = None


class Atif(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema_version: str
    agent: AtifAgent
    steps: tuple[AtifStep, ...]
    session_id: str | None = None
    trajectory_id: str | None = None
    final_metrics: JsonObject | None = None
    extra: JsonObject | None = None
    subagent_trajectories: list[JsonObject] | None = None


Act = tuple[object, AtifStep, StepExtra, LlmCall | None, Tokens | None]
"""An agent step with the key of its game step, and its call unless it asked no model."""

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def read_atif(document: Document, within: str = "") -> Iterator[Trace]:
    """Yield one trace for each trajectory. ``within``: the id of the one that holds the document.

    The ids of embedded trajectories are unique in their document only.

    Raises:
        ImportFileError: a field is missing or has another type, steps are not numbered from 1, or
            a step holds an image or a tool call without tokens.
    """
    place = document.place
    atif = convert(place, document.value, Atif)
    if not atif.schema_version.startswith(READABLE):
        raise ImportFileError(f"{place}: schema_version {atif.schema_version!r} is not {READABLE}x")
    digest = blake2b(msgspec.json.encode(document.value, order="sorted"), digest_size=8).hexdigest()
    own = atif.trajectory_id or atif.session_id or f"atif-{digest}"
    name = f"{within}:{own}" if within else own
    yield _trace(place, atif, name)
    for index, inner in enumerate(atif.subagent_trajectories or ()):
        yield from read_atif(Document(f"{place}: subagent_trajectories[{index}]", inner), name)


def _trace(place: str, atif: Atif, trajectory_id: str) -> Trace:
    extra = convert(place, (atif.extra or {}).get(OURS, {}), TrajectoryExtra)
    steps = tuple(_steps(place, atif))
    if not steps:
        raise ImportFileError(f"{place}: the document has no agent step to import")
    start, end = utc(place, extra.start) or steps[0].at, utc(place, extra.end)
    return Trace(
        **fields_of(replace(extra, start=start, end=end), Trace),
        trajectory_id=trajectory_id,
        agent_id=atif.agent.name,
        steps=steps,
        place=place,
    )


def _steps(place: str, atif: Atif) -> Iterator[TraceStep]:
    """Yield the steps. Agent steps that carry the same step number form one step."""
    conversation: list[list[Message]] = []
    acts: list[Act] = []
    for index, step in enumerate(atif.steps):
        where = f"{place}: steps[{index}]"
        if step.step_id != index + 1:
            raise ImportFileError(f"{where}: step_id is {step.step_id}, expected {index + 1}")
        extra = convert(where, (step.extra or {}).get(OURS, {}), StepExtra)
        is_act = step.source == "agent" and not step.is_copied_context
        has_call = is_act and step.llm_call_count != 0
        if has_call:
            prompt = [m for part in conversation[extra.prompt_from - 1 :] for m in part]
            call, tokens = _call(where, atif, step, extra, prompt)
        if is_act and (has_call or extra.action is not None):
            key = ("babylon", extra.step) if extra.step is not None else index
            acts.append((key, step, extra, *((call, tokens) if has_call else (None, None))))
        conversation.append(_later_context(where, step, extra))
    for _, group in groupby(acts, key=lambda act: act[0]):
        yield _step(place, list(group))


def _step(place: str, acts: list[Act]) -> TraceStep:
    _, step, extra, *_ = acts[-1]
    asked = [(call, tokens) for *_, call, tokens in acts if call is not None]
    return TraceStep(
        calls=tuple(call for call, _ in asked),
        tokens={i: tokens for i, (_, tokens) in enumerate(asked) if tokens is not None},
        at=utc(place, step.timestamp),
        state=extra.state,
        reward=extra.reward,
        action=unknown_action() if extra.action is None else extra.action,
    )


def _later_context(place: str, step: AtifStep, extra: StepExtra) -> list[Message]:
    """Return a step as later prompts hold it: its message, then the environment's results."""
    role = extra.role or _ROLES[step.source]
    text = parts_text(place, step.message)
    messages: list[Message] = [{"role": role, "content": text}] if text else []
    if extra.message is not None:
        messages = [extra.message]
    elif step.tool_calls:
        messages = [answer_message(text, _tool_calls(step))]
    results = (step.observation or {}).get("results")
    for result in results if isinstance(results, list) else ():
        content = result.get("content") if isinstance(result, dict) else None
        if content is not None:
            said: Message = {"role": "user", "content": parts_text(place, content)}
            answered = result.get("source_call_id")  # none: it is the environment's own
            if step.tool_calls and answered is not None:
                said |= {"role": "tool", "tool_call_id": str(answered)}
            messages.append(said)
    return messages


def _call(
    place: str, atif: Atif, step: AtifStep, extra: StepExtra, prompt: list[Message]
) -> tuple[LlmCall, Tokens | None]:
    if not prompt and OURS not in (step.extra or {}):
        raise ImportFileError(f"{place}: a reply without a prompt: no step comes before it")
    metrics = step.metrics or AtifMetrics()
    tokens = _tokens(place, metrics)
    call = LlmCall.of_messages(
        prompt,
        response=parts_text(place, step.message),
        model=step.model_name or atif.agent.model_name or "unknown",
        reasoning=step.reasoning_content,
        tool_calls=cast(list[JsonObject], (extra.message or {}).get("tool_calls"))
        or _tool_calls(step),
        **fields_of(extra, LlmCall),
        **fields_of(metrics, LlmCall),
    )
    return call, tokens


def _tool_calls(step: AtifStep) -> tuple[JsonObject, ...]:
    """Return the step's tool calls as OpenAI writes them."""
    return tuple(
        {
            "id": call.tool_call_id,
            "type": "function",
            "function": {
                "name": call.function_name,
                "arguments": msgspec.json.encode(call.arguments).decode(),
            },
        }
        for call in step.tool_calls or ()
    )


def _tokens(place: str, metrics: AtifMetrics) -> Tokens | None:
    """Return the exact tokens if ids, logprobs and policy version are all known.

    For a reply that must not be trained on, return the reason without tokens.
    """
    ids = (metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs)
    extra = convert(place, (metrics.extra or {}).get(OURS, {}), MetricsExtra)
    if extra.untrainable is not None:
        known = replace(extra, policy_version=extra.policy_version or 0)
        return Tokens(**fields_of(known, Tokens))
    if extra.policy_version is None or None in ids:
        return None
    tokens = Tokens(**fields_of(metrics, Tokens), **fields_of(extra, Tokens))
    return check_tokens(place, tokens)


_PLAIN, _RESULT = {"role", "content"}, {"role", "content", "tool_call_id"}
_SOURCES: dict[str, Source] = {"system": "system", "user": "user", "assistant": "agent"}


def write_atif(trace: Trace) -> JsonObject:
    """Return one document. A call that continues the conversation adds only its new messages."""
    steps: list[AtifStep] = []
    said: tuple[Message, ...] = ()  # the conversation so far, from step id ``begin``
    begin = 1
    for number, step in enumerate(trace.steps):
        for index, call in enumerate(step.calls):
            prompt = call.prompt
            if not said or prompt[: len(said)] != said:
                begin, said = len(steps) + 1, ()
            for message in prompt[len(said) :]:
                text_only = isinstance(message.get("content"), str)
                # Steps before ``begin`` are no part of the prompt.
                asked = len(steps) >= begin and steps[-1].tool_calls
                if asked and text_only and message.keys() == _RESULT:
                    steps[-1] = _with_result(steps[-1], message)
                else:
                    steps.append(_context(len(steps) + 1, message, step))
            extra = StepExtra(step=number, prompt_from=begin, **fields_of(call, StepExtra))
            if index == len(step.calls) - 1:
                extra = _with_action(extra, step)
            steps.append(_reply(len(steps) + 1, call, step.tokens.get(index), extra, step.at))
            said = (*prompt, answer_message(call.response or "", call.tool_calls))
        if not step.calls:
            act = AtifStep(
                step_id=len(steps) + 1,
                source="agent",
                message="",
                timestamp=step.at,
                llm_call_count=0,
                extra=_ours(_with_action(StepExtra(step=number), step)),
            )
            steps.append(act)
    model = next((call.model for step in trace.steps for call in step.calls), None)
    atif = Atif(
        schema_version=VERSION,
        session_id=trace.trajectory_id,
        trajectory_id=trace.trajectory_id,
        agent=AtifAgent(name=trace.agent_id, version="unknown", model_name=model),
        steps=tuple(steps),
        final_metrics=_totals(trace),
        extra=_ours(TrajectoryExtra(**fields_of(trace, TrajectoryExtra))),
    )
    document: JsonObject = msgspec.to_builtins(atif)
    return document


def _with_result(step: AtifStep, message: Message) -> AtifStep:
    """Return an agent's step with the result of one of its tool calls."""
    result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
    results = (step.observation or {}).get("results")
    known = results if isinstance(results, list) else []
    return replace(step, observation={"results": [*known, result]})


def _context(step_id: int, message: Message, step: TraceStep) -> AtifStep:
    role = str(message.get("role"))
    source = _SOURCES.get(role)
    agent = source == "agent"
    plain = message.keys() == _PLAIN and isinstance(message["content"], str) and message["content"]
    extra = StepExtra(
        role=None if source else role,
        message=None if plain else message,
    )
    return AtifStep(
        step_id=step_id,
        source=source or "user",
        message=content_text(message),
        tool_calls=_atif_tool_calls(message.get("tool_calls")) if agent else None,
        timestamp=step.at,
        llm_call_count=0 if agent else None,
        is_copied_context=True if agent else None,
        extra=None if extra == StepExtra() else _ours(extra),
    )


def _reply(
    step_id: int, call: LlmCall, tokens: Tokens | None, extra: StepExtra, at: datetime | None
) -> AtifStep:
    if call.tool_calls or not call.response:
        extra = replace(extra, message=answer_message(call.response or "", call.tool_calls))
    return AtifStep(
        step_id=step_id,
        source="agent",
        message=call.response or "",
        tool_calls=_atif_tool_calls(call.tool_calls),
        timestamp=at,
        model_name=call.model,
        reasoning_content=call.reasoning,
        metrics=_metrics(call, tokens),
        llm_call_count=1,
        extra=_ours(extra),
    )


def _atif_tool_calls(calls: object) -> list[AtifToolCall] | None:
    """Return OpenAI's tool calls as ATIF writes them. Calls that are no object are left out."""
    given = calls if isinstance(calls, list | tuple) else ()
    written = [_atif_tool_call(call) for call in given if isinstance(call, dict)]
    return written or None


def _atif_tool_call(call: JsonObject) -> AtifToolCall:
    """Return a call; arguments that are no object, also none as JSON text, are left out."""
    function = call.get("function")
    named = function if isinstance(function, dict) else {}
    arguments = decoded(named.get("arguments"))
    return AtifToolCall(
        tool_call_id=str(call.get("id")),
        function_name=str(named.get("name")),
        arguments=arguments if isinstance(arguments, dict) else {},
    )


def _with_action(extra: StepExtra, step: TraceStep) -> StepExtra:
    return replace(extra, action=step.action, state=step.state, reward=step.reward)


def _metrics(call: LlmCall, tokens: Tokens | None) -> AtifMetrics | None:
    counts = AtifMetrics(**fields_of(call, AtifMetrics))
    if tokens is None:
        return None if counts == AtifMetrics() else counts
    extra = _ours(MetricsExtra(**fields_of(tokens, MetricsExtra)))
    if tokens.untrainable is not None:
        return replace(counts, extra=extra)
    return AtifMetrics(
        prompt_tokens=len(tokens.prompt_token_ids),
        completion_tokens=len(tokens.completion_token_ids),
        extra=extra,
        **fields_of(tokens, AtifMetrics),
    )


def _totals(trace: Trace) -> JsonObject:
    metrics = [
        _metrics(call, step.tokens.get(i))
        for step in trace.steps
        for i, call in enumerate(step.calls)
    ]
    known = [one for one in metrics if one is not None]
    return {
        "total_prompt_tokens": sum(one.prompt_tokens or 0 for one in known),
        "total_completion_tokens": sum(one.completion_tokens or 0 for one in known),
        "total_steps": len(trace.steps),
    }


def _ours(extra: msgspec.Struct) -> JsonObject:
    return {OURS: msgspec.to_builtins(extra)}
