"""One chat request as an agent records it: an element of ``llmCalls`` in the game's ``stepsJson``.

The recorder writes it, validation reads it, and the trace formats convert to and from it.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

JsonObject: TypeAlias = dict[str, object]
Message: TypeAlias = dict[str, object]
"""One chat message as it was sent: OpenAI's JSON object. Its content may be text, a list of parts,
or null beside tool calls."""
_LONGEST_WORD = 16  # characters: "medium" is a setting, a name with its address is not

Purpose = Literal["action", "reasoning", "evaluation", "response"]
PURPOSES: frozenset[str] = frozenset(get_args(Purpose))
POLICY_PURPOSES = PURPOSES - {"evaluation"}  # the policy did not answer an evaluation


def object_of(value: object) -> JsonObject:
    """Return a decoded JSON object, empty if the value is none."""
    return value if isinstance(value, dict) else {}


class LlmCall(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """One chat request inside a step.

    ``purpose`` is one of ``PURPOSES``; calls for ``evaluation`` are not trained. ``messages`` holds
    the whole prompt if it was more than one system and one user message. ``model_version`` is the
    version of the policy that answered. ``response`` is the answer's text, None only in rows of the
    game, if the provider failed; ``tool_calls`` are the answer's tool calls, as OpenAI writes them.
    ``call_id`` is the gateway's id of the call (the answer's ``id``, or its header ``x-call-id``);
    rows of the game may hold an id of their own, of any type.
    """

    model: str = "unknown"
    system_prompt: str
    user_prompt: str
    response: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    max_tokens: int = 0
    purpose: str
    model_version: str | None = None
    reasoning: str | None = None
    latency_ms: int | None = None
    action_type: str | None = None
    messages: tuple[Message, ...] | None = None
    top_p: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    call_id: object = None
    tool_calls: tuple[JsonObject, ...] | None = None

    @classmethod
    def of_messages(
        cls,
        messages: Iterable[Message],
        *,
        purpose: Purpose = "action",
        temperature: float = 1.0,
        tool_calls: Iterable[JsonObject] | None = None,
        **fields: Any,
    ) -> "LlmCall":
        """Return a call with these messages. The prompts are the first message of each role."""
        sent = tuple(messages)
        return cls(
            messages=sent or None,
            system_prompt=_first_content(sent, "system"),
            user_prompt=_first_content(sent, "user"),
            purpose=purpose,
            temperature=temperature,
            tool_calls=tuple(tool_calls or ()) or None,
            **fields,
        )

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages as sent: ``messages``, else the two prompts that are not empty."""
        if self.messages:
            return self.messages
        prompts = (("system", self.system_prompt), ("user", self.user_prompt))
        return tuple([{"role": role, "content": text} for role, text in prompts if text])


def _first_content(messages: Iterable[Message], role: str) -> str:
    return next((content_text(one) for one in messages if one.get("role") == role), "")


def content_text(message: Message) -> str:
    """Return the message's text: its content, or the text parts of it. Other parts are named."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part if isinstance(part, dict) else {} for part in content]
    return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)


def tool_call_texts(tool_calls: Iterable[JsonObject]) -> list[str]:
    """Return each tool call as ``name(arguments)``."""
    functions = (call.get("function") for call in tool_calls)
    known = (function for function in functions if isinstance(function, dict))
    return [f"{one.get('name')}({one.get('arguments')})" for one in known]


def answer_message(
    response: str, tool_calls: Iterable[JsonObject] | None = None, reasoning: str | None = None
) -> Message:
    """Return the assistant's message of an answer."""
    message: Message = {"role": "assistant", "content": response}
    if calls := list(tool_calls or ()):
        message |= {"content": response or None, "tool_calls": calls}
    return message | ({"reasoning": reasoning} if reasoning else {})


class SentParameters(msgspec.Struct, frozen=True):
    """The recorded parameters of a request that shape its prompt, or hide parts of its answer."""

    tools: tuple[JsonObject, ...] | None = None
    documents: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    reasoning_effort: object = None
    include_reasoning: object = None

    @property
    def hides_text(self) -> bool:
        """True if token ids hold text that messages, tools and answer do not show.

        Variables of the template count unless they are numbers, truth values and single words.
        """
        given = self.chat_template_kwargs or {}
        variables = [*given.values(), self.reasoning_effort] if isinstance(given, dict) else [given]
        said = not all(map(_is_switch, variables))
        return bool(self.documents or self.chat_template or said or self.include_reasoning is False)


def _is_switch(value: object) -> bool:
    word = isinstance(value, str) and value.isalpha() and len(value) <= _LONGEST_WORD
    return word or value is None or isinstance(value, bool | int | float)
