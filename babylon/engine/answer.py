"""A completion on the wire: OpenAI's chat answer and chunks with vLLM's token ids."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from babylon.engine.generate import Request, Sampling
from babylon.engine.policies import Policy
from babylon.engine.scheduler import Job
from babylon.engine.text import TextStream
from babylon.wire import DONE, ChatRequest, RequestError, sse

DEFAULT_MAX_TOKENS = 1024  # a batch lasts as long as its longest answer, so there is a bound


def request_for(policy: Policy, chat: ChatRequest) -> Request:
    """Prompt tokens and sampling of a chat request.

    Raises:
        RequestError: 400, it does not fit into the policy's context, or the messages are bad.
    """
    prompt = policy.prompt(chat.messages)
    room = policy.context - len(prompt)
    if room < (chat.limit or 1):
        asked = "" if chat.limit is None else f" and max_tokens={chat.limit}"
        raise RequestError(
            400,
            f"a prompt of {len(prompt)} tokens{asked} does not fit into the context of"
            f" {policy.context} tokens of {policy.name!r}: send less",
            code="context_length_exceeded",
        )
    sampling = Sampling(
        max_tokens=chat.limit or min(room, DEFAULT_MAX_TOKENS),
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        seed=chat.seed,
    )
    return Request(prompt, sampling)


class Answer:
    """The pieces of one answer; usage and finish reason are known with the last of them."""

    def __init__(self, policy: Policy, chat: ChatRequest, job: Job) -> None:
        self._usage: dict[str, int] = {}
        self._finish_reason: str | None = None
        self._policy, self._chat, self._job = policy, chat, job
        self._prompt = list(job.request.prompt_token_ids)
        self._text = TextStream(policy.decode, chat.stops)
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": policy.name,
        }

    async def whole(self) -> bytes:
        """The answer as one JSON object."""
        text, token_ids, logprobs = "", list[int](), list[float]()
        async for piece, ids, scores in self._pieces():
            text += piece
            token_ids += ids
            logprobs += scores
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            **self._extras(token_ids, logprobs),
            "finish_reason": self._finish_reason,
        }
        body = self._head | {"object": "chat.completion", "choices": [choice], "usage": self._usage}
        return msgspec.json.encode(body | self._prompt_ids())

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; the first one tells the role."""
        role = {"role": "assistant", "content": ""}
        yield self._event([self._delta(role, {"logprobs": None})], **self._prompt_ids())
        async for text, ids, scores in self._pieces():
            yield self._event([self._delta({"content": text}, self._extras(ids, scores))])
        if self._chat.wants_usage:
            yield self._event([], usage=self._usage)
        yield DONE

    async def _pieces(self) -> AsyncIterator[tuple[str, list[int], list[float]]]:
        """(text, token ids, logprobs) until the answer ends."""
        count = 0
        async for token_ids, logprobs, last in self._job.tokens():
            text, used = self._text.push(token_ids, last=last)
            count += used
            if last or self._text.stopped:
                self._finish(count)
            yield text, token_ids[:used], logprobs[:used]
            if self._finish_reason:
                return

    def _finish(self, completion: int) -> None:
        self._finish_reason = "stop" if self._text.stopped else self._job.completion.finish_reason
        prompt = len(self._prompt)
        self._usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._prompt} if self._chat.return_token_ids else {}

    def _extras(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self._chat.logprobs:
            scored = zip(token_ids, logprobs, strict=True)
            extras["logprobs"] = {"content": [self._token(token, score) for token, score in scored]}
        if self._chat.return_token_ids:
            extras["token_ids"] = token_ids
        return extras

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._policy.token_text(token_id)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }

    def _delta(self, delta: dict[str, str], extras: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, "delta": delta, **extras, "finish_reason": self._finish_reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = self._head | {"object": "chat.completion.chunk", "choices": choices} | more
        return sse(msgspec.json.encode(body))
