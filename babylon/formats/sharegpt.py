"""ShareGPT conversations as chat lines: ``{"conversations": [{"from": "human", "value": ...}]}``.

https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html. Tools are turns
too: ``function_call`` is a call as JSON, ``observation`` its result. Turns after the last reply
teach nothing and are left out.
"""

from itertools import dropwhile

from babylon.core.llm_calls import JsonObject
from babylon.formats.foreign_messages import decoded, tool_call
from babylon.formats.trace import Document, ImportFileError

_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "observation": "tool", "tool": "tool", "tool_response": "tool",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")


def as_chat(document: Document) -> Document:
    """Return the conversation as a chat line.

    Raises:
        ImportFileError: it is not a list of turns with known speakers.
    """
    turns = document.value.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ImportFileError(f"{document.place}: conversations is not a non-empty list of turns")
    system = document.value.get("system")
    messages: list[JsonObject] = [{"role": "system", "content": system}] if system else []
    waiting: list[str] = []  # ids of calls without their result
    for index, turn in enumerate(turns):
        place = f"{document.place}: conversations[{index}]"
        said = turn if isinstance(turn, dict) else {}
        speaker, value = said.get("from"), said.get("value")
        if speaker in _CALLS:
            calls = _calls(place, index, value)
            waiting += [str(call["id"]) for call in calls]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            continue
        role = _ROLES.get(str(speaker))
        if role is None or not isinstance(value, str):
            known = ", ".join((*_ROLES, *_CALLS))
            raise ImportFileError(
                f"{place}: a turn from {speaker!r} with a {type(value).__name__}: give a text from"
                f" one of {known}"
            )
        answered = {"tool_call_id": waiting.pop(0)} if role == "tool" and waiting else {}
        messages.append({"role": role, "content": value, **answered})
    replies = [*dropwhile(lambda message: message["role"] != "assistant", reversed(messages))]
    return Document(document.place, {"messages": replies[::-1]}, document.line, document.end)


def _calls(place: str, turn: int, value: object) -> list[JsonObject]:
    found = decoded(value)
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) for call in calls):
        raise ImportFileError(f"{place}: a function call is not JSON")
    return [tool_call(place, turn + number, call) for number, call in enumerate(calls)]
