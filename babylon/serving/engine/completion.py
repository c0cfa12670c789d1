"""``POST /v1/completions``."""

from collections.abc import AsyncIterator, Mapping

from babylon.serving.engine.answer import Answer, Ids, Scores, request_for
from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.sampling import Request
from babylon.serving.engine.scheduler import Job
from babylon.serving.openai_wire import CompletionRequest, RequestError, parse_completion

MAX_TOKENS = 16  # OpenAI's default


def parse(fields: Mapping[str, object]) -> CompletionRequest:
    """Validate a completion request.

    Raises:
        RequestError: 400, it is malformed, or this engine does not support it.
    """
    asked = parse_completion(fields)
    if asked.logprobs:
        raise RequestError(
            400,
            f"logprobs={asked.logprobs}: this engine returns only the sampled tokens', logprobs=0",
        )
    return asked


def request_of(policy: LoadedPolicy, asked: CompletionRequest) -> Request:
    """Return the sampler's request for a completion.

    Raises:
        RequestError: 400, the prompt is empty, has unknown tokens, or does not fit.
    """
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
    return request_for(policy, ids, asked, MAX_TOKENS)


class CompletionAnswer(Answer):
    """A text completion, with vLLM's token ids. Those of the prompt are in the first choice."""

    KIND = CHUNK_KIND = "text_completion"
    ID_PREFIX = "cmpl"

    def __init__(self, policy: LoadedPolicy, asked: CompletionRequest, job: Job) -> None:
        super().__init__(policy, asked, job)
        self._wants_logprobs = asked.logprobs is not None
        self._offset = 0  # characters sent so far

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
        if not self._wants_logprobs:
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
