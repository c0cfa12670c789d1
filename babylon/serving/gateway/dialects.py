"""The two shapes of a call, chat and completion: what to ask the engine, where the answer is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from babylon.serving.openai_wire import ChatRequest, CompletionRequest, parse_chat, parse_completion

Asked = ChatRequest | CompletionRequest
Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """``logprobs`` of a request is what asks for them; of a choice, one a token."""

    path: str
    content: str  # the field that is the prompt
    parse: Callable[[Mapping[str, Any]], Asked]
    ask_logprobs: Callable[[Asked], bool | int]
    text: Callable[[Choice], str]
    logprobs: Callable[[Choice], list[float | None]]

    def prompt_json(self, fields: Mapping[str, Any]) -> bytes:
        """The prompt as it is stored: messages, or an object with the prompt of a completion."""
        prompt = fields[self.content]
        return msgspec.json.encode(prompt if self is CHAT else {self.content: prompt})


def _message_text(choice: Choice) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return message.get("content") or ""


def _content_logprobs(choice: Choice) -> list[float | None]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [score.get("logprob") for score in content]


CHAT = Dialect(
    path="/v1/chat/completions",
    content="messages",
    parse=parse_chat,
    ask_logprobs=lambda asked: True,
    text=_message_text,
    logprobs=_content_logprobs,
)
COMPLETION = Dialect(
    path="/v1/completions",
    content="prompt",
    parse=parse_completion,
    ask_logprobs=lambda asked: int(asked.logprobs or 0),
    text=lambda choice: choice.get("text") or "",
    logprobs=lambda choice: (choice.get("logprobs") or {}).get("token_logprobs") or [],
)
DIALECTS = {dialect.path: dialect for dialect in (CHAT, COMPLETION)}
