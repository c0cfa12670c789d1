"""Chat messages, one conversation a line, as fine-tuning takes them (SFT).

``{"messages": [{"role": "system", "content": ...}, ..., {"role": "assistant", "content": ...}]}``.
Lines that we write hold one call each, and beside the messages a ``metadata`` object that says
which call of which trajectory it is. In a line of somebody else every assistant message is a call,
whose prompt is all that stands before it; one with ``"weight": 0`` is context.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from hashlib import blake2b
from typing import Any

import msgspec

from babylon.core.trajectories import Message
from babylon.formats.documents import Document, ImportFileError
from babylon.formats.message_text import message_text, role_of
from babylon.formats.trace import Trace, TraceCall, TraceStep, convert, utc


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose call a line is."""

    trajectory_id: str
    agent_id: str
    step: int
    window_id: str | None = None
    scenario_id: str | None = None
    at: datetime | None = None
    model: str = "unknown"
    temperature: float = 1.0
    top_p: float | None = None
    max_tokens: int = 0
    reward: float = 0.0
    pnl_usd: float | None = None


def write_chat(trace: Trace) -> Iterator[dict[str, Any]]:
    """One line a call of the policy; evaluations are somebody else's words."""
    for number, step in enumerate(trace.steps):
        for call in step.calls:
            if call.purpose != "evaluation":
                yield _line(trace, number, step, call)


def _line(trace: Trace, number: int, step: TraceStep, call: TraceCall) -> dict[str, Any]:
    metadata = Metadata(
        trajectory_id=trace.trajectory_id,
        agent_id=trace.agent_id,
        step=number,
        window_id=trace.window_id,
        scenario_id=trace.scenario_id,
        at=step.at,
        model=call.model,
        temperature=call.temperature,
        top_p=call.top_p,
        max_tokens=call.max_tokens,
        reward=step.reward,
        pnl_usd=trace.final_pnl,
    )
    messages = [*call.messages, Message(role="assistant", content=call.response)]
    return {
        "messages": msgspec.to_builtins(messages),
        "metadata": msgspec.to_builtins(metadata),
    }


def read_chats(documents: Iterable[Document], agent_id: str) -> Iterator[Trace]:
    """Conversations as trajectories: lines of one ``metadata.trajectory_id`` are one.

    Raises:
        ImportFileError: a line is no conversation that ends in an assistant's text.
    """
    ours: dict[str, tuple[str, list[tuple[Metadata, TraceCall]]]] = {}
    for document in documents:
        messages, trained = _messages(document)
        metadata = document.value.get("metadata")
        if isinstance(metadata, dict) and "trajectory_id" in metadata:
            known = convert(document.place, metadata, Metadata)
            call = _call(messages, len(messages) - 1, known)
            ours.setdefault(known.trajectory_id, (document.place, []))[1].append((known, call))
        else:
            yield _foreign(document, messages, trained, agent_id)
    for place, lines in ours.values():
        yield _ours(place, lines)


def _messages(document: Document) -> tuple[list[Message], list[int]]:
    """The messages, and the positions of those to train on."""
    raw = document.value.get("messages")
    if not isinstance(raw, list) or not raw:
        raise ImportFileError(f"{document.place}: messages is not a list of chat messages")
    messages, trained = [], []
    for index, item in enumerate(raw):
        place = f"{document.place}: messages[{index}]"
        role = role_of(place, item)
        messages.append(Message(role=role, content=message_text(place, item)))
        if role == "assistant" and item.get("weight", 1):
            trained.append(index)
    if messages[-1].role != "assistant" or not trained:
        raise ImportFileError(
            f"{document.place}: the last message is {messages[-1].role}'s and"
            f" {len(trained)} are to be learnt: a conversation ends in an assistant's reply"
        )
    if trained[0] == 0:
        raise ImportFileError(f"{document.place}: the first message is the assistant's: no prompt")
    return messages, trained


def _call(messages: list[Message], reply: int, metadata: Metadata | None) -> TraceCall:
    known = metadata or Metadata(trajectory_id="", agent_id="", step=0)
    return TraceCall(
        messages=tuple(messages[:reply]),
        response=messages[reply].content,
        model=known.model,
        temperature=known.temperature,
        top_p=known.top_p,
        max_tokens=known.max_tokens,
    )


def _foreign(
    document: Document, messages: list[Message], trained: list[int], agent_id: str
) -> Trace:
    """The id follows from the words, so that a second import finds the first."""
    digest = blake2b(msgspec.json.encode(messages), digest_size=8).hexdigest()
    return Trace(
        trajectory_id=f"chat-{digest}",
        agent_id=agent_id,
        steps=tuple(TraceStep(calls=(_call(messages, reply, None),)) for reply in trained),
        place=document.place,
    )


def _ours(place: str, lines: list[tuple[Metadata, TraceCall]]) -> Trace:
    first = lines[0][0]
    by_step: dict[int, list[tuple[Metadata, TraceCall]]] = {}
    for metadata, call in lines:
        by_step.setdefault(metadata.step, []).append((metadata, call))
    steps = tuple(
        TraceStep(
            calls=tuple(call for _, call in by_step[number]),
            at=utc(place, by_step[number][0][0].at),
            reward=by_step[number][0][0].reward,
        )
        for number in sorted(by_step)
    )
    return Trace(
        trajectory_id=first.trajectory_id,
        agent_id=first.agent_id,
        steps=steps,
        window_id=first.window_id,
        scenario_id=first.scenario_id,
        start=steps[0].at,
        final_pnl=first.pnl_usd,
        place=place,
    )
