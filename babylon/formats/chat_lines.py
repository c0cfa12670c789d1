"""Chat messages for supervised fine-tuning (SFT), one conversation a line.

``{"messages": [{"role": "system", "content": ...}, ..., {"role": "assistant", "content": ...}]}``.
A line that Babylon wrote holds one call and a ``metadata`` object that identifies it. In any other
line, every assistant message is a call, and its prompt is everything before it. An assistant
message with ``"weight": 0`` is context only.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from hashlib import blake2b
from typing import cast

import msgspec
from msgspec.structs import replace

from babylon.core.llm_calls import JsonObject, LlmCall, Message, answer_message, content_text
from babylon.formats.foreign_messages import messages_of
from babylon.formats.trace import (
    Document,
    ImportFileError,
    LeaveOut,
    Trace,
    TraceStep,
    convert,
    fields_of,
    refuse,
    utc,
)


class ChatMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``metadata`` of a line: its call's trajectory, step and sampling.

    ``start`` is that of the trajectory: it decides the window, and may be before the first step.
    """

    trajectory_id: str
    agent_id: str
    step: int
    window_id: str | None = None
    scenario_id: str | None = None
    start: datetime | None = None
    at: datetime | None = None
    model: str = "unknown"
    temperature: float = 1.0
    top_p: float | None = None
    max_tokens: int = 0
    reward: float = 0.0
    pnl_usd: float | None = None


def write_chat(trace: Trace) -> Iterator[JsonObject]:
    """Yield one line for each call of the policy, because every line is learnt from.

    Left out are calls for evaluation, and replies that must not be trained on.
    """
    for number, step in enumerate(trace.steps):
        for index, call in enumerate(step.calls):
            if call.purpose != "evaluation" and step.untrainable(index) is None:
                yield _line(trace, number, step, call)


def _line(trace: Trace, number: int, step: TraceStep, call: LlmCall) -> JsonObject:
    metadata = ChatMetadata(
        step=number,
        pnl_usd=trace.final_pnl,
        **fields_of(trace, ChatMetadata),
        **fields_of(step, ChatMetadata),
        **fields_of(call, ChatMetadata),
    )
    answer = answer_message(call.response or "", call.tool_calls, call.reasoning)
    messages = [*call.prompt, answer]
    line: JsonObject = msgspec.to_builtins({"messages": messages, "metadata": metadata})
    return line


def read_chats(
    documents: Iterable[Document], agent_id: str, leave_out: LeaveOut = refuse
) -> Iterator[Trace]:
    """Yield the conversations as traces. Lines with the same ``metadata.trajectory_id`` form one.

    Raises:
        ImportFileError: a line is not a conversation that ends with an assistant's text, unless
            ``leave_out`` goes on.
    """
    # The lines of one trajectory may stand anywhere in the file.
    own_lines: dict[str, tuple[str, list[tuple[ChatMetadata, LlmCall]]]] = {}
    for document in documents:
        try:
            messages, trained = _messages(document)
            metadata = document.value.get("metadata")
            if isinstance(metadata, dict) and "trajectory_id" in metadata:
                known = convert(document.place, metadata, ChatMetadata)
                sent = _as_sent(document, messages)
                call = _call([*sent, messages[-1]], len(sent), known)
                _, lines = own_lines.setdefault(known.trajectory_id, (document.place, []))
                lines.append((known, call))
                continue
        except ImportFileError as error:
            leave_out(error)
            continue
        yield _other_trace(document, messages, trained, agent_id)
    for place, lines in own_lines.values():
        try:
            trace = _own_trace(place, lines)
        except ImportFileError as error:
            leave_out(error)
            continue
        yield trace


def _messages(document: Document) -> tuple[list[Message], list[int]]:
    """Return the messages and the positions of the assistant messages to train on."""
    raw = document.value.get("messages")
    if not isinstance(raw, list) or not raw:
        raise ImportFileError(
            f"{document.place}: messages is not a non-empty list of chat messages"
        )
    messages: list[Message] = []
    trained = []
    for index, item in enumerate(raw):
        place = f"{document.place}: messages[{index}]"
        if not isinstance(item, dict):
            raise ImportFileError(f"{place}: {item!r:.80} is not a message")
        messages += messages_of(place, item)
        if messages[-1]["role"] == "assistant" and item.get("weight", 1):
            trained.append(len(messages) - 1)
    if messages[-1]["role"] != "assistant" or not trained:
        raise ImportFileError(
            f"{document.place}: the last message has role {messages[-1]['role']}, and"
            f" {len(trained)} replies are to be learnt: a conversation must end with an assistant's"
            " reply"
        )
    if trained[0] == 0:
        raise ImportFileError(f"{document.place}: the first reply has no prompt")
    return messages, trained


def _as_sent(document: Document, messages: list[Message]) -> list[Message]:
    """Return the prompt of a line of ours as it stands there, with names, parts and all roles."""
    raw: list[Message] = convert(document.place, document.value["messages"], list[Message])
    return raw[:-1] if len(raw) == len(messages) else messages[:-1]


def _call(messages: list[Message], reply: int, metadata: ChatMetadata | None) -> LlmCall:
    sampling = fields_of(metadata, LlmCall) if metadata else {}
    answer = messages[reply]
    return LlmCall.of_messages(
        messages[:reply],
        response=content_text(answer),
        tool_calls=cast(list[JsonObject], answer.get("tool_calls")),
        reasoning=answer.get("reasoning"),
        **sampling,
    )


def _other_trace(
    document: Document, messages: list[Message], trained: list[int], agent_id: str
) -> Trace:
    # The id is a hash of the messages, so that a second import recognizes the first.
    digest = blake2b(msgspec.json.encode(messages), digest_size=8).hexdigest()
    return Trace(
        trajectory_id=f"chat-{digest}",
        agent_id=agent_id,
        steps=tuple(TraceStep(calls=(_call(messages, reply, None),)) for reply in trained),
        place=document.place,
    )


def _own_trace(place: str, lines: list[tuple[ChatMetadata, LlmCall]]) -> Trace:
    first = lines[0][0]
    by_step: dict[int, list[tuple[ChatMetadata, LlmCall]]] = {}
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
    start = utc(place, first.start) or steps[0].at
    return Trace(
        **fields_of(replace(first, start=start), Trace),
        steps=steps,
        final_pnl=first.pnl_usd,
        place=place,
    )
