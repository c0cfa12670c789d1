"""Messages of other systems as OpenAI's: their roles, parts, tool calls and tool results.

One reader for all of them, because they differ only in names: OpenAI's own messages, the parts of
OpenTelemetry's GenAI conventions, Anthropic's blocks, and LangChain's serialized messages.
"""

from collections.abc import Iterable, Mapping

import msgspec

from babylon.core.llm_calls import JsonObject, Message
from babylon.formats.trace import ROLES, ImportFileError, T, convert

_ROLES = {
    "developer": "system", "human": "user", "ai": "assistant", "gpt": "assistant",
    "model": "assistant", "function": "tool", "observation": "tool",
}  # fmt: skip
_TEXT = ("text", "input_text", "output_text")
_REASONING = ("reasoning", "thinking")
_CALL = ("tool_call", "tool_use", "function_call")
_RESULT = ("tool_call_response", "tool_result")
_IMAGE = ("image", "image_url", "input_image", "document")
_MEDIA = (*_IMAGE, "audio", "input_audio", "file", "input_file", "video", "blob", "uri")
_PARTS = (*_TEXT, *_REASONING, *_CALL, *_RESULT, *_MEDIA)
_INSTRUCTIONS = ("system", "instructions", "system_instruction")  # beside the messages
_HOLDS = {"choices", "generations", "messages", "prompts", "parts", "kwargs"}
_WRAPS = ("message", "output", "completion", "input", "prompt", "content", "text")
_KINDS = (*_TEXT, *_REASONING, *_CALL, *_RESULT, *_ROLES, *ROLES)
_OF_REPLY = {  # keys of a message without a role
    "content", "type", "id", "name", "tool_calls", "function_call", "reasoning",
    "reasoning_content", "additional_kwargs", "response_metadata", "usage_metadata", "usage",
    "finish_reason", "refusal", "annotations", "audio", "invalid_tool_calls", "example", "lc",
}  # fmt: skip
_OF_MESSAGE = {*_OF_REPLY, "role", "parts", "model", "status", "stop_reason", "stop_sequence"}


def messages_of(place: str, item: object, role: str | None = None) -> list[Message]:
    """Return one foreign message as OpenAI's; several tool results in it become several messages.

    ``role`` is that of a message which names none.

    Raises:
        ImportFileError: the role is unknown, or a part is neither text, reasoning nor a tool's.
    """
    fields = _unwrapped(item)
    if fields is None:
        raise ImportFileError(f"{place}: {item!r:.80} is not a message")
    named = fields.get("role") or fields.get("type") or role
    known = _ROLES.get(str(named), named)
    if known not in ROLES:
        raise ImportFileError(f"{place}: role {named!r} is not one of {', '.join(ROLES)}")
    content = fields["parts"] if "parts" in fields else fields.get("content")
    parts = _parts(place, content)
    texts = [_text(place, part) for part in parts if part.get("type") in _TEXT]
    calls = _own_calls(place, fields)
    ids = {str(call["id"]) for call in calls if call.get("id")}
    calls += [  # LangChain keeps a call of Anthropic in the content and beside it
        part
        for part in parts
        if part.get("type") in _CALL and not ids & {str(part.get("id")), str(part.get("call_id"))}
    ]
    results = [_result(place, part) for part in parts if part.get("type") in _RESULT]
    message: Message = {"role": str(known), "content": "".join(texts) if texts else None}
    if calls:
        message["tool_calls"] = [tool_call(place, n, call) for n, call in enumerate(calls)]
    elif not texts and not results:
        raise ImportFileError(f"{place}: content {content!r:.80} is not text")
    if thoughts := _thoughts(fields, parts):
        message["reasoning"] = thoughts
    if known == "tool" and (answered := fields.get("tool_call_id") or fields.get("id")):
        message["tool_call_id"] = answered
    return [*results, message] if texts or calls else results


def _unwrapped(item: object) -> JsonObject | None:
    """Return the message's fields; LangChain writes them in ``kwargs`` or ``data``."""
    if not isinstance(item, dict):
        return None
    inner = item.get("kwargs") if item.get("lc") else item.get("data")
    if not isinstance(inner, dict):
        return item
    kind = inner.get("type") or item.get("type")
    if kind == "constructor":  # ["langchain", "schema", "messages", "HumanMessage"]
        names = item.get("id")
        last = names[-1] if isinstance(names, list) and names else ""
        kind = str(last).removesuffix("Chunk").removesuffix("Message").lower()
    return {**inner, "type": kind}


def _parts(place: str, content: object) -> list[JsonObject]:
    """Return the content as a list of parts of known types.

    Raises:
        ImportFileError: the content is no text, or a part of it is of another type.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ImportFileError(f"{place}: content {content!r:.80} is not text")
    parts = []
    for part in content:
        one = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in (*_TEXT, *_REASONING, *_CALL, *_RESULT):
            raise ImportFileError(f"{place}: a part of type {kind!r} is not text")
        parts.append(one)
    return parts


def _text(place: str, part: JsonObject) -> str:
    text = part.get("text", part.get("content"))
    if not isinstance(text, str):
        raise ImportFileError(f"{place}: a part of type {part.get('type')!r} is not text")
    return text


def _thoughts(fields: JsonObject, parts: Iterable[JsonObject]) -> str:
    """Return the reasoning of a message, empty if it has none or an encrypted one."""
    more = fields.get("additional_kwargs")  # LangChain keeps DeepSeek's there
    for owner in (fields, more if isinstance(more, dict) else {}):
        for name in ("reasoning", "reasoning_content"):
            if isinstance(own := owner.get(name), str) and own:
                return own
    names = ("content", "text", "thinking", "reasoning")
    found = [
        next((part[name] for name in names if isinstance(part.get(name), str)), "")
        for part in parts
        if part.get("type") in _REASONING
    ]
    return "\n".join(str(text) for text in found if text)


def _own_calls(place: str, fields: JsonObject) -> list[JsonObject]:
    more = fields.get("additional_kwargs")  # LangChain before 0.2 kept OpenAI's calls there
    calls = fields.get("tool_calls") or (isinstance(more, dict) and more.get("tool_calls"))
    if calls:
        return convert(place, calls, list[JsonObject])
    function = fields.get("function_call")
    return [convert(place, function, JsonObject)] if function else []


def tool_call(place: str, number: int, raw: Mapping[str, object]) -> JsonObject:
    """Return a tool call as OpenAI writes it. One without an id is named by its number.

    Raises:
        ImportFileError: the call names no function.
    """
    function = raw.get("function")
    if not isinstance(function, dict):
        function = raw
    name = function.get("name")
    if not isinstance(name, str):
        raise ImportFileError(f"{place}: a tool call names no function")
    arguments = next(
        (function[key] for key in ("arguments", "args", "input") if key in function), None
    )
    return {
        "id": str(raw.get("id") or raw.get("call_id") or f"call_{number}"),
        "type": "function",
        "function": {"name": name, "arguments": as_text({} if arguments is None else arguments)},
    }


def _result(place: str, part: JsonObject) -> Message:
    """Return a tool's result. Blocks of text become their text; any other value stays JSON."""
    answer = next((part[key] for key in ("response", "result", "content") if key in part), "")
    blocks = answer if isinstance(answer, list) else []
    kinds = [one.get("type") if isinstance(one, dict) else None for one in blocks]
    if image := next((kind for kind in kinds if kind in _IMAGE), None):
        raise ImportFileError(f"{place}: a part of type {image!r} is not text")
    if kinds and all(kind in _TEXT for kind in kinds):
        answer = "".join(_text(place, one) for one in blocks)
    answered = part.get("id") or part.get("tool_use_id")
    named = {"tool_call_id": str(answered)} if answered else {}
    return {"role": "tool", "content": as_text(answer), **named}


def as_text(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def decoded(value: object) -> object:
    """Return the document that a text holds, if it holds an object or a list; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def prompt_of(place: str, value: object) -> list[Message]:
    """Return the recorded input of a call: messages, an object that holds them, or a prompt's text.

    Raises:
        ImportFileError: it is none of these.
    """
    value = record_of(value)
    if isinstance(value, dict):
        names = ("messages", "prompts", "prompt", "input")
        if (found := next((value[name] for name in names if value.get(name)), None)) is not None:
            return _instructed(place, value, prompt_of(place, found))
        value = [value]
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value:
        if isinstance(value[0], list | str):  # a batch; a run has one item
            if len(value) > 1:
                raise ImportFileError(f"{place}: {len(value)} prompts in one call, expected 1")
            return prompt_of(place, value[0])
        return [
            message
            for index, item in enumerate(value)
            for message in messages_of(f"{place}: message {index}", item)
        ]
    raise ImportFileError(f"{place}: no input was recorded: record content in the traced program")


def _instructed(place: str, record: JsonObject, prompt: list[Message]) -> list[Message]:
    """Return the prompt behind the system's text that stands beside its messages."""
    told = next((record[name] for name in _INSTRUCTIONS if record.get(name)), None)
    if told is None or prompt[0]["role"] == "system":
        return prompt
    fields = told if isinstance(told, dict) else {"content": told}
    return [*messages_of(place, {**fields, "role": "system"}), *prompt]


def reply_of(place: str, value: object) -> Message:
    """Return the recorded output of a call: a message, an object that holds it, or its text.

    A text is read as a record only if it is one beyond doubt, because agents answer in JSON too.

    Raises:
        ImportFileError: it is none of these, or there are several.
    """
    found = decoded(value)
    return _reply(place, found if _is_answer(found) else value)


def _reply(place: str, value: object) -> Message:
    """Return the reply that a record holds. A text inside it is the model's, whatever it says."""
    if isinstance(value, dict) and value:
        names = ("choices", "generations", "message", "output", "completion")
        # LangChain writes both, and only the message holds tool calls.
        found = next((value[name] for name in names if value.get(name)), None)
        if found is not None:
            return _reply(place, found)
        if "content" not in value and isinstance(value.get("text"), str):
            return _reply(place, value["text"])
        if not _is_record(value) and not {"content"} <= value.keys() <= _OF_REPLY:
            raise ImportFileError(
                f"{place}: the output is an object with the keys {', '.join(value):.80}, which is"
                " no message: record the reply's text in the traced program"
            )
        (message,) = one_reply(place, messages_of(place, value, "assistant"))
        return message
    if isinstance(value, str) and value:
        return {"role": "assistant", "content": value}
    if isinstance(value, list) and value:
        return _reply(place, one_reply(place, value)[0])
    raise ImportFileError(f"{place}: no output was recorded: record content in the traced program")


def record_of(value: object) -> object:
    """Return the record that a text holds. Any other text stays: agents answer in JSON too."""
    found = decoded(value)
    return found if _is_record(found) else value


def _is_record(value: object) -> bool:
    """Return True for a message, for an object that holds messages, and for a list of these."""
    if isinstance(value, list):
        batch = len(value) == 1 and isinstance(value[0], list)
        found = value[0] if batch else value
        return bool(found) and all(isinstance(one, dict) and _is_record(one) for one in found)
    if not isinstance(value, dict):
        return False
    if value.keys() & _HOLDS or (len(value) == 1 and value.keys() <= {*_WRAPS}):
        return True
    if value.get("role") in _KINDS or value.get("type") in _KINDS:
        return True
    return any(isinstance(value.get(name), dict | list) for name in _WRAPS)


def _is_answer(value: object) -> bool:
    """Return True for an assistant's message, a list of these, and a response with messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) and _is_answer(one) for one in value)
    fields = _unwrapped(value) or {}
    for replies in (fields.get("choices"), fields.get("generations")):
        if isinstance(replies, list) and replies:
            batch = replies[0] if isinstance(replies[0], list) else replies
            return all(isinstance(one, dict) and is_message(one.get("message")) for one in batch)
    named = fields.get("role") or fields.get("type")
    return _ROLES.get(str(named), named) == "assistant" and is_message(fields)


def is_message(value: object) -> bool:
    """Return True for a message with the keys of one and no others."""
    fields = _unwrapped(value) or {}
    return fields.keys() <= _OF_MESSAGE and bool(fields.keys() & {"content", "parts", "tool_calls"})


def are_parts(value: object) -> bool:
    """Return True for a list of a message's parts. Any other list may be what an agent said."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and part.get("type") in _PARTS for part in value)
    )


def one_reply(place: str, replies: list[T]) -> list[T]:
    """Return the only reply.

    Raises:
        ImportFileError: there are several, or none.
    """
    if len(replies) != 1:
        raise ImportFileError(f"{place}: {len(replies)} output messages, expected 1")
    return replies
