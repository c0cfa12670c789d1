"""The encoding of an answer, whole or as server-sent events, in OpenAI's and vLLM's fields."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import msgspec

from babylon.serving.engine.choice import ChatChoice, Choice
from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.openai_wire import DONE, JsonObject, SamplingRequest, sse


class Answer:
    """The answer to a chat or a completion, whole or as a stream.

    The first object of a chat has the prompt's token ids, as in vLLM; choices of a completion have
    their own.
    """

    def __init__(
        self, policy: LoadedPolicy, asked: SamplingRequest, choices: Sequence[Choice]
    ) -> None:
        self._asked, self._choices, self._kind = asked, choices, type(choices[0])
        self._unsent = len(choices)  # choices whose last event is to come
        self._head = {
            "id": f"{self._kind.ID_PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": policy.name,
        }

    async def whole(self) -> bytes:
        """Return the answer as one JSON object."""
        choices = await asyncio.gather(*(choice.whole() for choice in self._choices))
        body: JsonObject = {"object": self._kind.KIND, "choices": choices, "usage": self._usage()}
        return msgspec.json.encode(self._head | body | self._prompt_ids())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events.

        Events that are known at once are yielded together: each write costs both sides a wake-up.
        OpenAI's clients need the first event of each choice in the order of the choices.
        """
        opening = [part for choice in self._choices for part in choice.opening]
        begun = [self._event([part], **self._prompt_ids()) for part in opening[:1]]
        begun += [self._event([part]) for part in opening[1:]]
        async for part in _merged([choice.parts() for choice in self._choices]):
            self._unsent -= part["finish_reason"] is not None
            yield b"".join(begun) + self._event([part]) + self._end()
            begun = []

    @property
    def ended(self) -> bool:
        """True after the last event."""
        return not self._unsent

    def _usage(self) -> dict[str, int]:
        # A prompt counts once, however many choices it has.
        first = self._choices[:: self._asked.n or 1]
        prompt = sum(choice.prompt_tokens for choice in first)
        completion = sum(choice.completion_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt_ids(self) -> JsonObject:
        return dict(self._choices[0].prompt_ids) if self._kind is ChatChoice else {}

    def _event(self, choices: Sequence[JsonObject], **more: object) -> bytes:
        body = self._head | {"object": self._kind.CHUNK_KIND, "choices": choices} | more
        return sse(msgspec.json.encode(body))

    def _end(self) -> bytes:
        """Return the events after the last part: usage, if asked for, and ``[DONE]``."""
        if not self.ended:
            return b""
        usage = self._event([], usage=self._usage()) if self._asked.wants_usage else b""
        return usage + DONE


def _merged(streams: Sequence[AsyncIterator[JsonObject]]) -> AsyncIterator[JsonObject]:
    """Return one stream of all items, in the order in which they come."""
    return streams[0] if len(streams) == 1 else _as_they_come(streams)


async def _as_they_come(
    streams: Sequence[AsyncIterator[JsonObject]],
) -> AsyncIterator[JsonObject]:
    def following(stream: AsyncIterator[JsonObject]) -> asyncio.Future[JsonObject | None]:
        return asyncio.ensure_future(anext(stream, None))

    waiting = {following(stream): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                stream = waiting.pop(future)
                if part := future.result():
                    waiting[following(stream)] = stream
                    yield part
    finally:
        for future in waiting:
            future.cancel()
