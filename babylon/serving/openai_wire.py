"""OpenAI's wire format, and the vLLM fields beside it, as engine and gateway speak it.

vLLM's additions: ``return_token_ids`` in a request brings ``prompt_token_ids`` (once) and
``choices[].token_ids``; with ``logprobs`` these make a call exact training data.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from babylon.core.errors import ServingError

JsonObject: TypeAlias = dict[str, Any]
MAX_BODY_BYTES = 4 * 2**20
DONE = b"data: [DONE]\n\n"

# Parameters that bend the distribution beyond temperature and top_p, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "tool_choice": (None, "auto", "none"),
}


class RequestError(ServingError):
    """A request that is refused: an HTTP status, and a message in OpenAI's error shape."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> bytes:
        return error_body(self.status, str(self), self.code)


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class SamplingRequest(Struct, frozen=True, kw_only=True):
    """The fields of a request that Babylon reads; others are left to the engine."""

    model: Annotated[str, Meta(min_length=1, max_length=200)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: int | None = None
    stop: str | list[Annotated[str, Meta(min_length=1)]] | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    @property
    def wants_usage(self) -> bool:
        """In a stream usage comes only when asked for."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """OpenAI's new name of the token limit wins over the old one."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``: one prompt, as text or tokens."""

    prompt: str | Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None


Asked = TypeVar("Asked", bound=SamplingRequest)


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or ``RequestError`` 400 that says what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}") from error


def parse_chat(fields: Mapping[str, Any]) -> ChatRequest:
    """Check the fields of a chat request; the error names the field and what is allowed."""
    return _parsed(fields, ChatRequest, "chat")


def parse_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    """Check the fields of a completion request, likewise."""
    completion = _parsed(fields, CompletionRequest, "completion")
    if completion.echo or completion.best_of not in (None, 1):
        raise RequestError(400, "echo and best_of are not served: leave them out")
    return completion


def constraints(fields: Mapping[str, Any]) -> list[str]:
    """Names of the given parameters that bend the distribution beyond temperature and top_p."""
    return [name for name, neutral in _NEUTRAL.items() if fields.get(name) not in neutral]


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """``{"error": ...}`` as OpenAI writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})


def sse(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


def _parsed(fields: Mapping[str, Any], kind: type[Asked], name: str) -> Asked:
    try:
        asked = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"bad {name} request: {error}") from error
    if asked.n not in (None, 1):
        raise RequestError(400, f"n={asked.n}: only n=1 is served, send one request an answer")
    if asked.temperature is not None and 0 < asked.temperature < 0.01:
        raise RequestError(400, f"temperature={asked.temperature}: choose 0 (greedy) or 0.01 to 2")
    return asked
