"""Chats and completions: the request to the sampler, and the encoding of the answer."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

import msgspec

from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.sampling import Request, Sampling
from babylon.serving.engine.scheduler import Job
from babylon.serving.engine.text_stream import TextStream
from babylon.serving.engine.tool_calls import ToolCallParser
from babylon.serving.openai_wire import (
    DONE,
    ChatRequest,
    CompletionRequest,
    JsonObject,
    RequestError,
    SamplingRequest,
    sse,
)

CHAT_TOKENS = 1024  # if the client sets no limit: an endless answer would keep its batch row
COMPLETION_TOKENS = 16  # OpenAI's default
Ids: TypeAlias = Sequence[int]
Scores: TypeAlias = Sequence[float]


def chat_request(policy: LoadedPolicy, chat: ChatRequest) -> Request:
    """Return the sampler's request for a chat.

    Raises:
        RequestError: 400, it does not fit into the policy's context, a message is malformed, or
            this engine does not support a field.
    """
    if chat.top_logprobs:
        raise RequestError(400, f"top_logprobs={chat.top_logprobs}: this engine returns none")
    prompt = policy.prompt(chat.messages, chat.usable_tools)
    return _request(policy, prompt, chat, CHAT_TOKENS)


def completion_request(policy: LoadedPolicy, asked: CompletionRequest) -> Request:
    """Return the sampler's request for a completion.

    Raises:
        RequestError: 400, the prompt is empty, has unknown tokens or does not fit, or this engine
            does not support a field.
    """
    if asked.logprobs:
        raise RequestError(
            400,
            f"logprobs={asked.logprobs}: this engine returns only the sampled tokens', logprobs=0",
        )
    prompt = asked.prompt
    ids = policy.encode(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise RequestError(400, "the prompt has no tokens: send at least one")
    if max(ids) >= policy.vocabulary:
        raise RequestError(
            400,
            f"prompt token {max(ids)} is outside the vocabulary of {policy.name!r}"
            f" ({policy.vocabulary} tokens): send ids of its own tokenizer",
        )
    return _request(policy, ids, asked, COMPLETION_TOKENS)


def _request(
    policy: LoadedPolicy, prompt: list[int], asked: SamplingRequest, usual_limit: int
) -> Request:
    room = policy.context - len(prompt)
    if room < (asked.limit or 1):
        limit = "" if asked.limit is None else f" and max_tokens={asked.limit}"
        raise RequestError(
            400,
            f"a prompt of {len(prompt)} tokens{limit} does not fit into the context of"
            f" {policy.name!r}, {policy.context} tokens: send less",
            code="context_length_exceeded",
        )
    sampling = Sampling(
        max_tokens=asked.limit or min(room, usual_limit),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=asked.seed,
    )
    return Request(prompt, sampling)


class Answer(ABC):
    """One answer, whole or as a stream. Subclasses encode chats and completions."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    ID_PREFIX: ClassVar[str]

    def __init__(self, policy: LoadedPolicy, asked: SamplingRequest, job: Job) -> None:
        self._usage: dict[str, int] = {}
        self._finish_reason: str | None = None
        self._policy, self._asked, self._job = policy, asked, job
        self._text = TextStream(policy.decode, asked.stops)
        self._head = {
            "id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": policy.name,
        }

    @abstractmethod
    async def whole(self) -> bytes:
        """Return the answer as one JSON object."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events.

        Events that are known at once are yielded together: each write costs both sides a wake-up.
        """

    @property
    def ended(self) -> bool:
        """True after the last piece."""
        return self._finish_reason is not None

    async def _all(self) -> tuple[str, list[int], list[float]]:
        text, token_ids, logprobs = "", list[int](), list[float]()
        async for piece, ids, scores in self._pieces():
            text += piece
            token_ids += ids
            logprobs += scores
        return text, token_ids, logprobs

    async def _pieces(self) -> AsyncIterator[tuple[str, list[int], list[float]]]:
        """Yield (text, token ids, logprobs) until the answer ends."""
        count = 0
        async for token_ids, logprobs, last in self._job.tokens():
            text, used = self._text.push(token_ids, last=last)
            count += used
            if last or self._text.stopped:
                self._finish(count)
            yield text, token_ids[:used], logprobs[:used]
            if self.ended:
                return

    def _finish(self, completion: int) -> None:
        self._finish_reason = "stop" if self._text.stopped else self._job.completion.finish_reason
        prompt = len(self._job.row.prompt)
        self._usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _choice(
        self, content: Mapping[str, object], token_ids: Ids | None = None
    ) -> dict[str, object]:
        choice = {"index": 0, **content, "finish_reason": self._finish_reason}
        if self._asked.return_token_ids and token_ids is not None:
            choice["token_ids"] = token_ids
        return choice

    def _prompt_ids(self) -> dict[str, Ids]:
        return {"prompt_token_ids": self._job.row.prompt} if self._asked.return_token_ids else {}

    def _body(self, choice: Mapping[str, object], **more: object) -> bytes:
        body = self._head | {"object": self.KIND, "choices": [choice], "usage": self._usage} | more
        return msgspec.json.encode(body)

    def _event(self, choices: Sequence[Mapping[str, object]], **more: object) -> bytes:
        body = self._head | {"object": self.CHUNK_KIND, "choices": choices} | more
        return sse(msgspec.json.encode(body))

    def _end(self) -> bytes:
        """Return the events after the last piece: usage, if asked for, and ``[DONE]``."""
        if not self.ended:
            return b""
        usage = self._event([], usage=self._usage) if self._asked.wants_usage else b""
        return usage + DONE


class ChatAnswer(Answer):
    """A chat completion, with vLLM's token ids. Tool calls are parsed if the request has tools."""

    KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
    ID_PREFIX = "chatcmpl"

    def __init__(self, policy: LoadedPolicy, asked: ChatRequest, job: Job) -> None:
        super().__init__(policy, asked, job)
        most = 1 if asked.parallel_tool_calls is False else None
        self._tools = ToolCallParser(most=most) if asked.usable_tools else None

    async def whole(self) -> bytes:
        text, token_ids, logprobs = await self._all()
        text, calls = self._parsed(text)
        message: dict[str, object] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        content = {"message": message, "logprobs": self._logprobs(token_ids, logprobs)}
        return self._body(self._choice(content, token_ids), **self._prompt_ids())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the role first, then the text."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        begun = self._event([self._choice(role)], **self._prompt_ids())
        sent = 0
        async for piece, ids, scores in self._pieces():
            text, calls = self._parsed(piece)
            delta: dict[str, object] = {"content": text} if text or not calls else {}
            if calls:
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls, start=sent)]
                sent += len(calls)
            content = {"delta": delta, "logprobs": self._logprobs(ids, scores)}
            yield begun + self._event([self._choice(content, ids)]) + self._end()
            begun = b""

    def _parsed(self, text: str) -> tuple[str, list[JsonObject]]:
        """Return the text without its tool calls, and the calls."""
        if self._tools is None:
            return text, []
        plain, calls = self._tools.push(text, last=self.ended)
        if self._finish_reason == "stop" and self._tools.found:
            self._finish_reason = "tool_calls"
        return plain, calls

    def _logprobs(self, token_ids: Ids, logprobs: Scores) -> dict[str, object] | None:
        if not self._asked.wants_logprobs:
            return None
        texts = map(self._policy.token_text, token_ids)
        return {
            "content": [
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }


class CompletionAnswer(Answer):
    """A text completion, with vLLM's token ids. Those of the prompt are in the first choice."""

    KIND = CHUNK_KIND = "text_completion"
    ID_PREFIX = "cmpl"
    _offset = 0  # characters sent so far

    async def whole(self) -> bytes:
        return self._body(self._part(*await self._all()) | self._prompt_ids())

    async def events(self) -> AsyncIterator[bytes]:
        prompt_ids = self._prompt_ids()
        async for piece in self._pieces():
            yield self._event([self._part(*piece) | prompt_ids]) + self._end()
            prompt_ids = {}

    def _part(self, text: str, token_ids: Ids, logprobs: Scores) -> dict[str, object]:
        content = {"text": text, "logprobs": self._logprobs(token_ids, logprobs)}
        return self._choice(content, token_ids)

    def _logprobs(self, token_ids: Ids, logprobs: Scores) -> dict[str, object] | None:
        if not self._asked.wants_logprobs:
            return None
        tokens, offsets = [self._policy.token_text(token) for token in token_ids], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": list(logprobs),
            "tokens": tokens,
            "top_logprobs": [{t: score} for t, score in zip(tokens, logprobs, strict=True)],
        }
