"""One choice of an answer: the text, tokens and finish reason of one sampled completion."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.sampling import TopLogprobs
from babylon.serving.engine.scheduler import Job
from babylon.serving.engine.text_stream import TextStream
from babylon.serving.engine.tool_calls import ToolCallParser
from babylon.serving.openai_wire import ChatRequest, CompletionRequest, JsonObject

ModelRequest: TypeAlias = ChatRequest | CompletionRequest


class Piece(NamedTuple):
    """A part of a completion: its text, token ids, logprobs, and the likeliest tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[TopLogprobs]


class Choice(ABC):
    """One choice, whole or in parts. Subclasses encode those of chats and completions."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    ID_PREFIX: ClassVar[str]

    def __init__(self, policy: LoadedPolicy, asked: ModelRequest, job: Job, index: int) -> None:
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self._policy, self._asked, self._job, self._index = policy, asked, job, index
        self._text = TextStream(policy.decode, asked.stops)

    @abstractmethod
    async def whole(self) -> JsonObject:
        """Return the choice as one object."""

    @abstractmethod
    def parts(self) -> AsyncIterator[JsonObject]:
        """Yield the objects of a stream."""

    @property
    def opening(self) -> list[JsonObject]:
        """Return the first part of a stream, before the parts of all choices."""
        return []

    @property
    def prompt_ids(self) -> dict[str, Sequence[int]]:
        """The field with the prompt's token ids, if the client asks for it."""
        return {"prompt_token_ids": self._job.row.prompt} if self._asked.return_token_ids else {}

    @property
    def prompt_tokens(self) -> int:
        return len(self._job.row.prompt)

    @property
    def ended(self) -> bool:
        """True after the last part."""
        return self.finish_reason is not None

    async def _all(self) -> Piece:
        text, token_ids, logprobs, top = "", list[int](), list[float](), list[TopLogprobs]()
        async for piece in self._pieces():
            text += piece.text
            token_ids += piece.token_ids
            logprobs += piece.logprobs
            top += piece.top
        return Piece(text, token_ids, logprobs, top)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces until the completion ends."""
        async for token_ids, logprobs, last in self._job.tokens():
            text, used = self._text.push(token_ids, last=last)
            seen, self.completion_tokens = self.completion_tokens, self.completion_tokens + used
            top = self._job.completion.top[seen : self.completion_tokens]
            if self._text.stopped:
                self.finish_reason = "stop"
            elif last:
                self.finish_reason = self._job.completion.finish_reason
            yield Piece(text, token_ids[:used], logprobs[:used], top)
            if self.ended:
                return

    def _object(self, content: JsonObject, token_ids: Sequence[int]) -> JsonObject:
        choice = {"index": self._index, **content, "finish_reason": self.finish_reason}
        if self._asked.return_token_ids:
            choice["token_ids"] = token_ids
            if self._job.row.request.constraint:  # such tokens are not trained
                choice["constrained"] = True
        return choice


class ChatChoice(Choice):
    """A choice of a chat. Tool calls are parsed if the request has tools."""

    KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
    ID_PREFIX = "chatcmpl"

    def __init__(self, policy: LoadedPolicy, asked: ChatRequest, job: Job, index: int) -> None:
        super().__init__(policy, asked, job, index)
        most = 1 if asked.parallel_tool_calls is False else None
        self._tools = ToolCallParser(most=most) if asked.usable_tools else None

    async def whole(self) -> JsonObject:
        piece = await self._all()
        text, calls = self._parsed(piece.text)
        message: JsonObject = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        content = {"message": message, "logprobs": self._logprobs(piece)}
        return self._object(content, piece.token_ids)

    @property
    def opening(self) -> list[JsonObject]:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [{"index": self._index, **role, "finish_reason": None}]

    async def parts(self) -> AsyncIterator[JsonObject]:
        sent = 0
        async for piece in self._pieces():
            text, calls = self._parsed(piece.text)
            delta: JsonObject = {} if calls else {"content": text}
            if calls:
                if text:  # alone: Haystack refuses a delta with both
                    alone = {"delta": {"content": text}, "logprobs": None}
                    yield {"index": self._index, **alone, "finish_reason": None}
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls, start=sent)]
                sent += len(calls)
            content = {"delta": delta, "logprobs": self._logprobs(piece)}
            yield self._object(content, piece.token_ids)

    def _parsed(self, text: str) -> tuple[str, list[JsonObject]]:
        """Return the text without its tool calls, and the calls."""
        if self._tools is None:
            return text, []
        plain, calls = self._tools.push(text, last=self.ended)
        if self.finish_reason == "stop" and self._tools.found:
            self.finish_reason = "tool_calls"
        return plain, calls

    def _logprobs(self, piece: Piece) -> JsonObject | None:
        if not self._asked.wants_logprobs:
            return None
        top: Sequence[TopLogprobs] = piece.top or [[]] * len(piece.token_ids)
        return {
            "content": [
                {**self._token(token, score), "top_logprobs": [self._token(*one) for one in tops]}
                for token, score, tops in zip(piece.token_ids, piece.logprobs, top, strict=True)
            ]
        }

    def _token(self, token_id: int, logprob: float) -> JsonObject:
        text, as_bytes = self._policy.token_text(token_id), self._policy.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(as_bytes)}


class CompletionChoice(Choice):
    """A choice of a text completion. It has its prompt's token ids."""

    KIND = CHUNK_KIND = "text_completion"
    ID_PREFIX = "cmpl"
    _offset = 0  # characters sent so far

    async def whole(self) -> JsonObject:
        return self._part(await self._all()) | self.prompt_ids

    async def parts(self) -> AsyncIterator[JsonObject]:
        prompt_ids = self.prompt_ids
        async for piece in self._pieces():
            yield self._part(piece) | prompt_ids
            prompt_ids = {}

    def _part(self, piece: Piece) -> JsonObject:
        return self._object(
            {"text": piece.text, "logprobs": self._logprobs(piece)}, piece.token_ids
        )

    def _logprobs(self, piece: Piece) -> JsonObject | None:
        """Return OpenAI's four lists. ``top_logprobs`` has the drawn token too, as in vLLM."""
        if not self._asked.wants_logprobs:
            return None
        text = self._policy.token_text
        tokens, offsets = [text(token) for token in piece.token_ids], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top: Sequence[TopLogprobs] = piece.top or [[]] * len(tokens)
        return {
            "text_offset": offsets,
            "token_logprobs": list(piece.logprobs),
            "tokens": tokens,
            "top_logprobs": [
                {text(other): other_score for other, other_score in tops} | {token: score}
                for token, score, tops in zip(tokens, piece.logprobs, top, strict=True)
            ],
        }
