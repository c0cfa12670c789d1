"""OpenAI's wire format with vLLM's additional fields, shared by engine and gateway.

With ``return_token_ids`` in a request, vLLM answers with ``prompt_token_ids`` (once) and
``choices[].token_ids``. Together with ``logprobs`` they make a call exact training data.

The types are ours because openai's request types are TypedDicts, which validate nothing.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from math import lcm
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from babylon.core.errors import ServingError
from babylon.core.text import is_deeper

JsonObject: TypeAlias = dict[str, Any]  # decoded, not validated
MAX_BODY_BYTES = 4 * 2**20
MAX_CHOICES = 32  # of a request: answers to a batch of prompts times n
MAX_DEPTH = 900  # levels of a body; some deeper ones are decoded, but not encoded again
MAX_STOPS, MAX_STOP = 32, 1000  # strings that end an answer, and characters of one
MAX_TOP_LOGPROBS = 20  # vLLM's and OpenAI's limit
# A grammar has as many states as the least common multiple of a schema's ``multipleOf``, without
# the zeros at the end. A prime of six digits takes a minute, one of ten all memory.
MAX_MULTIPLE = 10_000
DONE = b"data: [DONE]\n\n"
_TEXT_PARTS = {"text", "refusal", "input_text", "output_text", "thinking"}  # vLLM's
_WORD = re.compile(r"[a-z][a-z_]{0,39}")
# Escapes of JSON after an even number of backslashes: a pair of surrogates, or a half of one.
_SURROGATES = re.compile(
    rb"(?<!\\)(?P<before>(?:\\\\)*)"
    rb"(?:\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2}))"
)

# Parameters that change the sampling distribution, beside temperature and top_p, and the values
# with which they do not. None, which means "not given", never does.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "ignore_eos": (False,),  # the end would be ignored, not sampled
    "use_beam_search": (False,),
    "best_of": (1,),
    "thinking_token_budget": (-1,),  # forces the end of a thought
    "vllm_xargs": ({},),  # may name any logits processor
    "watermarking": (False,),  # favours some tokens
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
}

# Parameters that leave the distribution as it is: they make the prompt, which is recorded in
# tokens, end the answer early, or shape the response. Sources: OpenAI's reference of both
# endpoints, and ``ChatCompletionRequest`` and ``CompletionRequest`` of vLLM 0.32. Not among them
# are ``repetition_detection`` and the parameters that hand over a cache from elsewhere.
_HARMLESS = {
    "model", "messages", "prompt", "suffix", "tools", "functions", "parallel_tool_calls",
    "documents", "reasoning_effort", "verbosity", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side",
    "temperature", "top_p", "seed", "n", "max_tokens", "max_completion_tokens", "stop",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "stream", "stream_options", "echo", "logprobs",
    "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids",
    "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text",
    "return_assistant_tokens_mask", "include_reasoning",
    "user", "metadata", "store", "service_tier", "safety_identifier", "moderation",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt", "priority",
    "request_id", "session_id", "stream_interval", "routed_experts_prompt_start",
}  # fmt: skip


class RequestError(ServingError):
    """A refused request, with its HTTP status and its message in OpenAI's error format.

    ``retry_after_s`` is sent with the statuses 429 and 503.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    @property
    def body(self) -> bytes:
        return error_body(self.status, str(self), self.code)


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


Stops = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]], Meta(max_length=MAX_STOPS)
]


class SamplingRequest(Struct, frozen=True, kw_only=True):
    """The fields of a request that Babylon reads. The engine gets all other fields unchanged."""

    model: Annotated[str, Meta(min_length=1, max_length=200)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: Annotated[str, Meta(max_length=MAX_STOP)] | Stops | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def choices(self) -> int:
        """Number of answers."""
        return self.n or 1

    @property
    def likeliest(self) -> int:
        """Number of likeliest tokens to report at each place."""
        return 0

    @property
    def wants_logprobs(self) -> bool:
        """True also for 0, which asks a completion for one logprob per token."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[JsonObject], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    @property
    def usable_tools(self) -> list[JsonObject]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def limit(self) -> int | None:
        """The token limit. OpenAI's new field takes precedence over ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``: one prompt, as text or token ids, or several."""

    prompt: str | Annotated[list[TokenId | str | TokenIds], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. The first item of a list tells whether it is one or holds several."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], self.prompt if several else [self.prompt])

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @property
    def choices(self) -> int:
        return len(self.prompts) * (self.n or 1)


Sampled = TypeVar("Sampled", bound=SamplingRequest)


def decode_batch(body: bytes) -> object:
    """Decode a request's JSON, in which U+FFFD replaces each half of a surrogate pair.

    Programs that count a text in UTF-16 leave such halves where they cut it. One must not cost a
    whole batch of events, nor a conversation each of its later calls.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no JSON, or nested too deep.
    """
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return msgspec.json.decode(_SURROGATES.sub(_whole, body))


def _whole(found: re.Match[bytes]) -> bytes:
    return found["before"] + rb"\ufffd" if found["half"] else found[0]


def decode_object(body: bytes) -> JsonObject:
    """Decode a request body.

    Raises:
        RequestError: 400, it is not a JSON object, or nested too deeply.
    """
    try:
        fields = msgspec.convert(decode_batch(body), JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_deeper(fields, MAX_DEPTH):
        raise RequestError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    return fields


def parse_chat(fields: Mapping[str, object]) -> ChatRequest:
    """Validate a chat request, or raise ``RequestError`` 400 with the field and what it allows."""
    chat = _validated(fields, ChatRequest, "chat")
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError(400, f"top_logprobs={chat.top_logprobs}: they need logprobs=true")
    if chat.response_format or chat.tool_choice not in (None, "none", "auto"):
        _require_small_multiples([chat.response_format, chat.tools])
    return chat


def _require_small_multiples(schemas: list[object]) -> None:
    """Check the numbers of which a constrained answer may hold multiples.

    Raises:
        RequestError: 400, their least common multiple is so large that a grammar would take long.
    """
    left, common = schemas, 1
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            common = lcm(common, _digits(part.get("multipleOf")))
            if common > MAX_MULTIPLE:
                raise RequestError(
                    400,
                    "the schemas' multipleOf have no common multiple of at most"
                    f" {MAX_MULTIPLE}: leave some out, and check those numbers in the agent",
                )


def _digits(number: object) -> int:
    """Return the digits of a number without point and zeros at the ends; 1 if it is none."""
    if not isinstance(number, int | float):
        return 1
    exact = Decimal(number) if isinstance(number, int) else Decimal(repr(number))
    return int("".join(map(str, exact.normalize().as_tuple().digits))) or 1


def parse_completion(fields: Mapping[str, object]) -> CompletionRequest:
    completion = _validated(fields, CompletionRequest, "completion")
    if isinstance(completion.prompt, list) and len({*map(type, completion.prompt)}) > 1:
        raise RequestError(400, "prompt mixes kinds: send a text, token ids, or a list of either")
    if completion.echo or completion.best_of not in (None, 1):
        raise RequestError(400, "echo and best_of are not supported: leave them out")
    return completion


def constraints(fields: Mapping[str, object]) -> list[str]:
    """Return the parameters, without temperature and top_p, that change the distribution."""
    return [
        name
        for name, value in fields.items()
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]
    ]


def unknown_fields(fields: Mapping[str, object]) -> list[str]:
    """Return the parameters that may bend the sampling distribution."""
    known = _HARMLESS | _NEUTRAL.keys()
    return [name for name, value in fields.items() if value is not None and name not in known]


def other_parts(fields: Mapping[str, object]) -> list[str]:
    """Return the types of the messages' content parts that are not text, such as images."""
    messages = fields.get("messages")
    told = messages if isinstance(messages, list) else []  # a completion may have anything there
    contents = [one.get("content") for one in told if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sorted({_kind_of_part(part) for part in parts} - _TEXT_PARTS)


def _kind_of_part(part: object) -> str:
    """Return the part's type as it may be recorded: what is no plain word may be a secret."""
    if isinstance(part, str):
        return "text"
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) and _WORD.fullmatch(kind) else "a part of unknown type"


def for_engine(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return a request as engines take it: without ``strict`` that binds nothing, and with the role
    ``system`` in place of ``developer``, which templates of open models skip or refuse."""
    messages = fields.get("messages")
    told = messages if isinstance(messages, list) else []
    if any(isinstance(one, dict) and one.get("role") == "developer" for one in told):
        fields = {**fields, "messages": [_of_system(one) for one in told]}
    return _free_of_strict(fields)


def _of_system(message: object) -> object:
    named = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if named else message  # type: ignore[dict-item]


def _free_of_strict(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields without ``strict`` in tools that the answer is not forced to call.

    vLLM constrains the sampling of a request with a strict tool (unless it runs with
    VLLM_ENFORCE_STRICT_TOOL_CALLING=0, which cannot be seen from outside), and shows the word to
    the model (vllm-project/vllm#52741).
    """
    tools = fields.get("tools")
    if not isinstance(tools, list) or fields.get("tool_choice") not in (None, "auto", "none"):
        return fields
    left = [_tool_free_of_strict(tool) for tool in tools]
    return fields if left == tools else {**fields, "tools": left}


def _tool_free_of_strict(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or "strict" not in function:
        return tool
    left = {name: value for name, value in function.items() if name != "strict"}
    return {**tool, "function": left}


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """Encode an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})


def error_message(body: bytes) -> str:
    """Return the message of an error response in OpenAI's or FastAPI's format, or its text."""
    try:
        answer = msgspec.json.decode(body)
        return str(answer["error"]["message"] if "error" in answer else answer["detail"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def sse(payload: bytes) -> bytes:
    """Encode a payload without line breaks as a server-sent event."""
    return b"data: " + payload + b"\n\n"


def _validated(fields: Mapping[str, object], kind: type[Sampled], name: str) -> Sampled:
    try:
        asked = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"bad {name} request: {error}") from error
    if asked.choices > MAX_CHOICES:
        raise RequestError(
            400, f"{asked.choices} answers: ask for at most {MAX_CHOICES} in one request"
        )
    if asked.temperature is not None and 0 < asked.temperature < 0.01:
        raise RequestError(400, f"temperature={asked.temperature}: choose 0 (greedy) or 0.01 to 2")
    return asked
