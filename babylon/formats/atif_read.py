"""Reader of ATIF: one document becomes its own trace and one trace for each subagent in it."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import groupby

import msgspec

from babylon.core.trajectories import Message
from babylon.formats.atif import (
    OURS,
    READABLE,
    Atif,
    AtifMetrics,
    AtifStep,
    MetricsExtra,
    StepExtra,
    TrajectoryExtra,
)
from babylon.formats.documents import Document, ImportFileError, JsonObject
from babylon.formats.message_text import parts_text, refuse_tool_call
from babylon.formats.trace import (
    Tokens,
    Trace,
    TraceCall,
    TraceStep,
    check_tokens,
    convert,
    unknown_action,
    utc,
)

Act = tuple[object, AtifStep, StepExtra, TraceCall | None]
"""An agent step with the key of its game step, and its call unless it asked no model."""

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def read_atif(document: Document) -> Iterator[Trace]:
    """Yield one trace for each trajectory.

    Raises:
        ImportFileError: a field is missing or has another type, steps are not numbered from 1, or
            a step holds an image or a tool call without tokens.
    """
    place = document.place
    atif = convert(place, document.value, Atif)
    if not atif.schema_version.startswith(READABLE):
        raise ImportFileError(f"{place}: schema_version {atif.schema_version!r} is not {READABLE}x")
    yield _trace(place, atif, document.value)
    for index, inner in enumerate(atif.subagent_trajectories or ()):
        yield from read_atif(Document(f"{place}: subagent_trajectories[{index}]", inner))


def _trace(place: str, atif: Atif, raw: JsonObject) -> Trace:
    extra = convert(place, (atif.extra or {}).get(OURS, {}), TrajectoryExtra)
    steps = tuple(_steps(place, atif))
    if not steps:
        raise ImportFileError(f"{place}: the document has no agent step to import")
    digest = blake2b(msgspec.json.encode(raw, order="sorted"), digest_size=8).hexdigest()
    return Trace(
        trajectory_id=atif.trajectory_id or atif.session_id or f"atif-{digest}",
        agent_id=atif.agent.name,
        steps=steps,
        window_id=extra.window_id,
        scenario_id=extra.scenario_id,
        start=utc(place, extra.start) or steps[0].at,
        end=utc(place, extra.end),
        final_balance=extra.final_balance,
        final_pnl=extra.final_pnl,
        status=extra.status,
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
            call = _call(where, atif, step, extra, prompt)
        if is_act and (has_call or extra.action is not None):
            key = ("babylon", extra.step) if extra.step is not None else index
            acts.append((key, step, extra, call if has_call else None))
        conversation.append(_later_context(where, step, extra))
    for _, group in groupby(acts, key=lambda act: act[0]):
        yield _step(place, list(group))


def _step(place: str, acts: list[Act]) -> TraceStep:
    _, step, extra, _ = acts[-1]
    return TraceStep(
        calls=tuple(call for *_, call in acts if call is not None),
        at=utc(place, step.timestamp),
        state=extra.state,
        reward=extra.reward,
        action=unknown_action() if extra.action is None else extra.action,
    )


def _later_context(place: str, step: AtifStep, extra: StepExtra) -> list[Message]:
    """Return a step as later prompts hold it: its message, then the environment's results."""
    role = extra.role or _ROLES[step.source]
    text = parts_text(place, step.message)
    messages = [Message(role=role, content=text)] if text else []
    results = (step.observation or {}).get("results")
    for result in results if isinstance(results, list) else ():
        content = result.get("content") if isinstance(result, dict) else None
        if content is not None:
            sender = "tool" if step.tool_calls else "user"
            messages.append(Message(role=sender, content=parts_text(place, content)))
    return messages


def _call(
    place: str, atif: Atif, step: AtifStep, extra: StepExtra, prompt: list[Message]
) -> TraceCall:
    if not prompt:
        raise ImportFileError(f"{place}: a reply without a prompt: no step comes before it")
    metrics = step.metrics or AtifMetrics()
    tokens = _tokens(place, metrics)
    if step.tool_calls and tokens is None:
        refuse_tool_call(place)
    return TraceCall(
        messages=tuple(prompt),
        response=parts_text(place, step.message),
        model=step.model_name or atif.agent.model_name or "unknown",
        temperature=extra.temperature,
        top_p=extra.top_p,
        max_tokens=extra.max_tokens,
        purpose=extra.purpose,
        action_type=extra.action_type,
        reasoning=step.reasoning_content,
        latency_ms=extra.latency_ms,
        prompt_tokens=metrics.prompt_tokens,
        completion_tokens=metrics.completion_tokens,
        tokens=tokens,
    )


def _tokens(place: str, metrics: AtifMetrics) -> Tokens | None:
    """Return the exact tokens if ids, logprobs and policy version are all known."""
    ids = (metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs)
    extra = convert(place, (metrics.extra or {}).get(OURS, {}), MetricsExtra)
    if extra.policy_version is None or None in ids:
        return None
    tokens = Tokens(
        prompt_token_ids=metrics.prompt_token_ids or (),
        completion_token_ids=metrics.completion_token_ids or (),
        logprobs=metrics.logprobs or (),
        policy_version=extra.policy_version,
        route_version=extra.route_version,
        finish_reason=extra.finish_reason,
        seed=extra.seed,
    )
    return check_tokens(place, tokens)
