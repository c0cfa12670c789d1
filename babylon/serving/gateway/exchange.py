"""The state of one call: its caller, what was sampled, and whether it can be trained on.

No I/O. The engine is always asked for logprobs and token ids; the client gets them only if it
asked for them.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import unquote

import msgspec

from babylon.core.text import storable, storable_json
from babylon.serving.gateway.asgi import Headers
from babylon.serving.gateway.play.sessions import ChatSession
from babylon.serving.gateway.route_table import Assignment
from babylon.serving.openai_wire import (
    ChatRequest,
    CompletionRequest,
    JsonObject,
    RequestError,
    constraints,
    for_engine,
    other_parts,
    parse_chat,
    parse_completion,
    unknown_fields,
)
from babylon.store.calls import RecordedCall

T = TypeVar("T")
ModelRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Field access for one endpoint.

    ``content`` is the prompt's field. ``ask_logprobs`` returns the ``logprobs`` field for the
    engine. ``message`` and ``logprobs`` read a choice or a chunk of it: the message, and one
    logprob per token.
    """

    path: str
    content: str
    parse: Callable[[Mapping[str, object]], ModelRequest]
    ask_logprobs: Callable[[ModelRequest], bool | int]
    message: Callable[[JsonObject], JsonObject]
    logprobs: Callable[[JsonObject], list[float | None]]

    def prompt_json(self, fields: Mapping[str, object]) -> bytes:
        """Encode the prompt for storage: messages, or ``{"prompt": ...}`` of a completion."""
        prompt = fields[self.content]
        return msgspec.json.encode(prompt if self is CHAT else {self.content: prompt})


def _content_logprobs(choice: JsonObject) -> list[float | None]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [score.get("logprob") for score in content]


CHAT = Dialect(
    path="/v1/chat/completions",
    content="messages",
    parse=parse_chat,
    ask_logprobs=lambda asked: True,
    message=lambda choice: choice.get("delta") or choice.get("message") or {},
    logprobs=_content_logprobs,
)
COMPLETION = Dialect(
    path="/v1/completions",
    content="prompt",
    parse=parse_completion,
    ask_logprobs=lambda asked: int(asked.logprobs or 0),
    message=lambda choice: {"content": choice.get("text")},
    logprobs=lambda choice: (choice.get("logprobs") or {}).get("token_logprobs") or [],
)
DIALECTS = {dialect.path: dialect for dialect in (CHAT, COMPLETION)}

_MAX_ID = 200  # characters
_EXTENDED = b"utf-8''"
_AGENT, _TRAJECTORY, _STEP = b"x-babylon-agent", b"x-babylon-trajectory", b"x-babylon-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The caller: agent, trajectory and step. ``session`` recognised the trajectory, if it was."""

    agent_id: str | None
    trajectory_id: str | None
    step: int | None
    session: ChatSession | None = None

    @property
    def named(self) -> str | None:
        """The trajectory that the caller named."""
        return None if self.session else self.trajectory_id

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], user: str | None) -> "Identity":
        """Read the ``x-babylon-*`` headers. OpenAI's ``user`` is the agent if there is no header.

        Raises:
            RequestError: 400, a header is repeated, or its value cannot be read or stored.
        """
        given: dict[bytes, str] = {}
        for name, value in headers:
            if name.startswith(b"x-babylon-"):
                if name in given:  # two readers could attribute the call to different agents
                    raise RequestError(400, f"{name.decode()} is sent twice: send it once")
                given[name] = header_text(name, value)
        step = given.get(_STEP)
        if step is not None and not (step.isascii() and step.isdigit() and len(step) <= 9):
            raise RequestError(400, f"x-babylon-step {step!r:.80}: send the step's number")
        return cls(
            agent_id=_checked(_AGENT, given.get(_AGENT)) or _checked(b"user", user),
            trajectory_id=_checked(_TRAJECTORY, given.get(_TRAJECTORY)),
            step=None if step is None else int(step),
        )


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request to a policy, and the part of the answer that has arrived.

    Of several choices, the first is noted.
    """

    call_id: str
    identity: Identity
    request: ModelRequest
    fields: Mapping[str, object]
    dialect: Dialect
    assigned: Assignment
    key_id: str
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    first_at: datetime | None = None
    text: str = ""
    message: JsonObject = field(default_factory=dict)  # without the text
    # Arrays refuse what is no number, or no 32-bit one, as it arrives: what cannot be recorded is
    # never answered.
    prompt_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    finish_reason: str | None = None
    usage_prompt: int | None = None  # tokens of all prompts, as the engine counts them
    completion_tokens: int | None = None
    other_tokens: int = 0  # of the choices that are not noted
    ended_choices: int = 0
    recorded: RecordedCall | None = None  # as the rules allow it

    def upstream_body(self) -> bytes:
        """Encode the request for the engine, with the policy's name and explicit sampling."""
        added: JsonObject = {
            "model": self.assigned.target.name,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.dialect.ask_logprobs(self.request),
            "return_token_ids": True,
        }
        if self.request.stream:
            added["stream_options"] = {"include_usage": True}
        return msgspec.json.encode({**for_engine(self.fields), **added})

    @property
    def attribution(self) -> Headers:
        """The response's headers about the policy that answers, and the recognised session."""
        assigned, session = self.assigned, self.identity.session
        return [
            *(session.headers if session else ()),
            (b"x-model-version", str(assigned.target.policy_version).encode()),
            (b"x-arm", assigned.arm.encode()),
            (b"x-route-version", str(assigned.route.route_version).encode()),
            (b"x-call-id", self.call_id.encode()),
        ]

    @property
    def temperature(self) -> float:
        return 1.0 if self.request.temperature is None else self.request.temperature

    @property
    def top_p(self) -> float:
        return 1.0 if self.request.top_p is None else self.request.top_p

    def note(self, answer: JsonObject) -> JsonObject | None:
        """Note an answer or a chunk of it.

        Returns:
            The answer as the client may see it, or ``None`` for a usage chunk that it did not ask
            for. This is ``answer``, modified.

        Raises:
            AttributeError, KeyError, OverflowError, TypeError, ValueError: a field has another
                form than OpenAI's.
        """
        if self.first_at is None:
            self.first_at = datetime.now(UTC)
        if not self.prompt_token_ids:  # vLLM repeats them in the first chunk of each choice
            self.prompt_token_ids.extend(answer.get("prompt_token_ids") or ())
        usage = answer.get("usage")
        if usage:
            self.usage_prompt = _of_type(int, usage.get("prompt_tokens"))
            self.completion_tokens = _of_type(int, usage.get("completion_tokens"))
        choices = answer.get("choices") or []
        for choice in choices:
            self.ended_choices += bool(choice.get("finish_reason"))
            if choice.get("index"):
                self.other_tokens += len(choice.get("token_ids") or ())
            else:
                self._note_choice(choice)
        if self.request.stream and not choices and not self.request.wants_usage:
            return None
        return self._for_client(answer, choices)

    @property
    def used(self) -> tuple[int, int]:
        """Tokens of all prompts and of all choices. An interrupted answer has no usage."""
        arrived = len(self.token_ids) + self.other_tokens
        prompts = max(self.usage_prompt or 0, len(self.prompt_token_ids))
        return prompts, max(self.completion_tokens or 0, arrived)

    @property
    def ended(self) -> bool:
        """True after the last part of the last choice."""
        return self.ended_choices >= self.request.choices

    def _note_choice(self, choice: JsonObject) -> None:
        for name, value in self.dialect.message(choice).items():
            if name == "content":
                self.text += value or ""
            elif name == "tool_calls":
                _add_tool_calls(self.message.setdefault(name, []), value or [])
            elif isinstance(value, str) and name != "role":  # reasoning, a refusal
                self.message[name] = self.message.get(name, "") + value
        self.prompt_token_ids.extend(choice.get("prompt_token_ids") or ())
        self.token_ids.extend(choice.get("token_ids") or ())
        scores = self.dialect.logprobs(choice)
        self.logprobs.extend([math.nan if score is None else score for score in scores])
        self.finish_reason = _of_type(str, choice.get("finish_reason")) or self.finish_reason

    def _for_client(self, answer: JsonObject, choices: list[JsonObject]) -> JsonObject:
        if "id" in answer:
            answer["id"] = self.call_id  # an agent names its call by it
        if "model" in answer:
            answer["model"] = self.assigned.target.name  # an engine may use another name
        if not self.request.return_token_ids:
            answer.pop("prompt_token_ids", None)
            for choice in choices:
                choice.pop("prompt_token_ids", None)
                choice.pop("token_ids", None)
        if not self.request.wants_logprobs:
            for choice in choices:
                choice["logprobs"] = None
        return answer

    def untrainable_reason(self) -> str | None:
        """Return the reason why this call cannot be trained on, or ``None``."""
        if self.request.choices > 1:
            return (
                f"one of {self.request.choices} choices: the caller chose among them, so the one"
                " that it used is no plain sample"
            )
        tokens, scores, counted = len(self.token_ids), len(self.logprobs), self.completion_tokens
        if not tokens == scores == counted:
            return f"{tokens} token ids, {scores} logprobs, but usage says {counted} tokens"
        if not tokens or not self.prompt_token_ids:
            return "no tokens"
        if not all(map(math.isfinite, self.logprobs)):
            return "a logprob is not finite"
        if min(self.logprobs) <= -9999:  # vLLM's minus infinity, which JSON lacks
            return "a logprob is -9999, which stands for minus infinity"
        if self.temperature == 0:
            return "temperature 0: greedy, not sampled"
        if self.top_p < 1:
            return f"top_p {self.top_p}: not sampled from the whole distribution"
        if changing := constraints(self.fields):
            return f"the sampling distribution was changed by {', '.join(changing)}"
        if unknown := unknown_fields(self.fields):
            return f"unknown fields may change the sampling distribution: {', '.join(unknown)}"
        if parts := other_parts(self.fields):
            return f"the prompt holds {', '.join(parts)}, which is not in its tokens"
        return None

    @property
    def answer(self) -> str | None:
        """The answer's message as JSON, ``None`` if its text is all that it holds."""
        more = {name: value for name, value in self.message.items() if value}
        if not more:
            return None
        message = {"role": "assistant", "content": self.text or None, **more}
        return storable_json(msgspec.json.encode(message).decode())

    def record(self, *, interrupted: str | None = None) -> RecordedCall:
        """Return the call for storage; ``interrupted`` is why only a part of the answer arrived."""
        if (session := self.identity.session) and not interrupted:
            session.answered(self.text, self.message.get("tool_calls") or ())
        reason = interrupted or self.untrainable_reason()
        elapsed = datetime.now(UTC) - self.started_at
        left_out = (self.dialect.content, "model")
        parameters = {name: value for name, value in self.fields.items() if name not in left_out}
        return RecordedCall(
            call_id=self.call_id,
            agent_id=self.identity.agent_id,
            trajectory_id=self.identity.trajectory_id,
            step_number=self.identity.step,
            policy_version=self.assigned.target.policy_version,
            route_version=self.assigned.route.route_version,
            model=self.assigned.target.name,
            messages=storable_json(self.dialect.prompt_json(self.fields).decode()),
            response=storable(self.text),
            answer=self.answer,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            completion_token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.request.limit or 0,  # 0: the client set no limit
            seed=self.request.seed,
            finish_reason="interrupted" if interrupted else self.finish_reason or "unknown",
            trainable=reason is None,
            untrainable_reason=None if reason is None else storable(reason),  # it may quote a field
            started_at=self.started_at,
            latency_ms=int(elapsed.total_seconds() * 1000),
            arm=self.assigned.arm,
            key_id=self.key_id,
            parameters=storable_json(msgspec.json.encode(parameters).decode()),
        )


def header_text(name: bytes, value: bytes) -> str:
    """Decode a header: UTF-8, or percent-encoded as ``utf-8''Jos%C3%A9`` (RFC 8187 section 3.2).

    Clients of HTTP that send ASCII only need the second form for other names of agents.

    Raises:
        RequestError: 400, it is neither.
    """
    try:
        if value[: len(_EXTENDED)].lower() == _EXTENDED:
            return unquote(value[len(_EXTENDED) :].decode("ascii"), errors="strict")
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            400, f"{name.decode()} {value!r:.80} is no UTF-8: send it as utf-8''PERCENT-ENCODED"
        ) from error


def _add_tool_calls(calls: list[JsonObject], added: list[JsonObject]) -> None:
    """Add whole tool calls, or the pieces of a stream: ``index`` is the position of a piece's call.

    https://platform.openai.com/docs/guides/function-calling#streaming
    """
    for piece in added:
        index = min(piece.get("index", len(calls)), len(calls))
        if index < 0:
            raise ValueError(f"a tool call has the index {index}")
        if index == len(calls):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""


def _of_type(kind: type[T], value: object) -> T | None:
    if value is None or isinstance(value, kind):
        return value
    raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")  # the value may be text


def _checked(name: bytes, value: str | None) -> str | None:
    if value is not None and (len(value) > _MAX_ID or not value.isprintable()):
        raise RequestError(
            400, f"{name.decode()} {value!r:.80}: send at most {_MAX_ID} printable characters"
        )
    return value or None
