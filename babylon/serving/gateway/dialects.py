"""The two kinds of a call, chat and completion: the request's fields and the answer's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from babylon.serving.openai_wire import (
    ChatRequest,
    CompletionRequest,
    JsonObject,
    parse_chat,
    parse_completion,
)

ModelRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Field access for one endpoint.

    ``content`` is the prompt's field. ``ask_logprobs`` returns the ``logprobs`` field for the
    engine. ``text`` and ``logprobs`` read a choice: its text, and one logprob per token.
    """

    path: str
    content: str
    parse: Callable[[Mapping[str, object]], ModelRequest]
    ask_logprobs: Callable[[ModelRequest], bool | int]
    text: Callable[[JsonObject], str]
    logprobs: Callable[[JsonObject], list[float | None]]

    def prompt_json(self, fields: Mapping[str, object]) -> bytes:
        """Encode the prompt for storage: messages, or ``{"prompt": ...}`` of a completion."""
        prompt = fields[self.content]
        return msgspec.json.encode(prompt if self is CHAT else {self.content: prompt})


def _message_text(choice: JsonObject) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return message.get("content") or ""


def _content_logprobs(choice: JsonObject) -> list[float | None]:
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
