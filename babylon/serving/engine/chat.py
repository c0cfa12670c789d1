"""``POST /v1/chat/completions``."""

from collections.abc import AsyncIterator, Mapping

from babylon.serving.engine.answer import Answer, Ids, Scores, request_for
from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.sampling import Request
from babylon.serving.engine.scheduler import Job
from babylon.serving.openai_wire import ChatRequest, RequestError, parse_chat

MAX_TOKENS = 1024  # if the client sets no limit: an endless answer would keep its batch row


def parse(fields: Mapping[str, object]) -> ChatRequest:
    """Validate a chat request.

    Raises:
        RequestError: 400, it is malformed, or this engine does not support it.
    """
    chat = parse_chat(fields)
    if chat.top_logprobs:
        raise RequestError(400, f"top_logprobs={chat.top_logprobs}: this engine returns none")
    return chat


def request_of(policy: LoadedPolicy, chat: ChatRequest) -> Request:
    """Return the sampler's request for a chat.

    Raises:
        RequestError: 400, it does not fit into the policy's context, or a message is malformed.
    """
    return request_for(policy, policy.prompt(chat.messages), chat, MAX_TOKENS)


class ChatAnswer(Answer):
    """A chat completion, with vLLM's token ids."""

    KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
    ID_PREFIX = "chatcmpl"

    def __init__(self, policy: LoadedPolicy, chat: ChatRequest, job: Job) -> None:
        super().__init__(policy, chat, job)
        self._wants_logprobs = bool(chat.logprobs)

    async def whole(self) -> bytes:
        text, token_ids, logprobs = await self._all()
        message = {"role": "assistant", "content": text}
        content = {"message": message, "logprobs": self._logprobs(token_ids, logprobs)}
        return self._body(self._choice(content, token_ids), **self._prompt_ids())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the role first, then the text."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        begun = self._event([self._choice(role)], **self._prompt_ids())
        async for text, ids, scores in self._pieces():
            content = {"delta": {"content": text}, "logprobs": self._logprobs(ids, scores)}
            yield begun + self._event([self._choice(content, ids)]) + self._end()
            begun = b""

    def _logprobs(self, token_ids: Ids, logprobs: Scores) -> dict[str, object] | None:
        if not self._wants_logprobs:
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
