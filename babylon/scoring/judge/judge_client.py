"""Client of a judge behind an OpenAI-compatible server: one request, and one of five outcomes.

An answer, a prompt that is too long, a refusal of what the prompt holds, a failure that may pass,
or a failure that stays. The caller decides what follows and who pays for it
(``babylon.scoring.judge.cached_judge``). Requests use structured output and
``max_completion_tokens``, unless the server refuses them. A model's name may begin with a provider,
as in ``openai/gpt-5-mini``; if the server does not know that name, the provider is left out.
"""

import asyncio
import json
import logging
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, cast

import aiohttp
import httpx
import msgspec
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from babylon.core.api_keys import engine_secret
from babylon.core.discretion import shown_url, told
from babylon.core.errors import ScoringError, ServingError, reason_of
from babylon.core.processes import Service, supervised
from babylon.scoring.judge.judgment import checkpoint_digest
from babylon.scoring.judge.prompt import Schema, count_tokens
from babylon.store.judgments import Spent

log = logging.getLogger(__name__)

MODEL = "judge"
TEMPERATURE = 0.7
_MOST_TOKENS = 2**31 - 1  # of a reply: the ledger's columns hold no more
_READY_S, _POLL_S = 180.0, 0.1
_LOAD = aiohttp.ClientTimeout(total=600)
_SCHEMA_REFUSED = re.compile(
    r"response.?format|json.?schema|structured|guided|grammar", re.IGNORECASE
)
_TOO_LONG = re.compile(r"context.?length|maximum context|context_window|too (?:long|large)", re.I)
# Errors 400 about the request's fields, not about the prompt in it.
_MISCONFIGURED = re.compile(
    r"unsupported|unknown_param|missing_required|invalid_value|invalid_api_key|model|billing", re.I
)
_CONTENT = re.compile(r"content|moderation|flagged|safety|policy|harm", re.I)
_PROVIDERS = frozenset(
    (
        *("anthropic", "azure", "deepseek", "gemini", "groq", "hosted_vllm", "lm_studio"),
        *("mistral", "ollama", "openai", "openrouter", "together_ai", "vllm", "xai"),
    )
)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class PromptTooLongError(Exception):
    """The prompt does not fit into the judge's context."""


class RequestRefusedError(Exception):
    """The server refuses what the prompt holds (400, 413, 422, a filter), not who asks."""


class RetryLaterError(Exception):
    """A failure that may pass: a rate limit, a broken server, no answer.

    ``after_s``: the wait that the server asks for. ``charged``: False if it certainly did no work.
    ``limited``: True if the server asks for fewer requests.
    """

    def __init__(
        self, message: str, *, after_s: float | None, charged: bool, limited: bool = False
    ) -> None:
        super().__init__(message)
        self.after_s, self.charged, self.limited = after_s, charged, limited


class _NoCompletionError(Exception):
    """An answer 200 that is not a chat completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices in US dollars per million tokens."""

    prompt_usd: float = 0.0
    completion_usd: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> Spent:
        usd = (prompt_tokens * self.prompt_usd + completion_tokens * self.completion_usd) / 1e6
        return Spent(tokens=prompt_tokens + completion_tokens, usd=usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswer:
    """The text of a reply and its tokens: the server's count, or ``count_tokens`` without one.

    ``cut``: the reply ended at ``max_tokens``. ``refused``: the model or a filter declined.
    ``thought``: the reply holds thoughts before the answer. ``cached_tokens`` of the prompt came
    from the provider's cache.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool = False
    refused: bool = False
    thought: bool = False
    cached_tokens: int = 0


@cache  # reading the certificates takes a tenth of a second of processor time
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class JudgeClient:
    """Client of one model. ``turn`` lets at most ``concurrency`` requests run at a time.

    Judgments are stored under ``name``, by default the model. With ``temperature`` None the server
    chooses, because some models accept only their own temperature.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str,
        api_key: str = "none",
        name: str | None = None,
        price: Price | None = None,
        temperature: float | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
    ) -> None:
        self.model, self.name = model, name or model
        self.price, self.temperature = price or Price(), temperature
        self.turn = asyncio.Semaphore(concurrency)
        self._url, self._key = shown_url(base_url), api_key
        self._structured, self._length = True, "max_completion_tokens"
        self._known = False  # True once the server has answered for ``model``
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            max_retries=0,
            timeout=timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(verify=_certificates()),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def ask(
        self, messages: Sequence[dict[str, str]], schema: Schema, *, max_tokens: int
    ) -> JudgeAnswer:
        """Send one request. Only fields that the server refuses make it send another.

        Raises:
            PromptTooLongError: the prompt does not fit into the judge's context.
            RequestRefusedError: the server refuses what the prompt holds.
            RetryLaterError: the failure may pass.
            ScoringError: the failure stays.
        """
        sent = [self._key, *(message["content"] for message in messages)]
        try:
            return _answer(await self._complete(messages, schema, max_tokens), messages)
        except openai.OpenAIError as error:
            failure: Exception = self._translated(error, sent)
        except (json.JSONDecodeError, UnicodeDecodeError, _NoCompletionError):
            said = "its answer is not a chat completion"
            failure = RetryLaterError(said, after_s=None, charged=True)
        except (ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            failure = self.failure(type(error).__name__)
        # Outside of ``except``, because a chained exception would show the server's own words.
        raise failure

    def failure(self, problem: str) -> ScoringError:
        """Return the error of a judge that cannot be asked."""
        return ScoringError(
            f"judge {self.name} at {self._url}: {problem}; earlier judgments are stored: correct"
            " JUDGE_MODEL, JUDGE_BASE_URL or the key, or run the window again later"
        )

    def _translated(self, error: openai.OpenAIError, sent: Sequence[str]) -> Exception:
        said = told(str(error), sent)
        if isinstance(error, openai.APITimeoutError | openai.APIConnectionError):
            charged = not isinstance(error.__cause__, _NOT_SENT)
            return RetryLaterError(said, after_s=None, charged=charged)
        if not isinstance(error, openai.APIStatusError):
            return RetryLaterError(said, after_s=None, charged=True)
        status, code = error.status_code, f"{error.code or ''} {error.type or ''}"
        if status == 429 and "quota" not in code:
            after_s = _wait_s(error.response.headers)
            return RetryLaterError(said, after_s=after_s, charged=False, limited=True)
        if status in (408, 409) or status >= 500:
            return RetryLaterError(said, after_s=_wait_s(error.response.headers), charged=True)
        if status in (400, 413, 422, 451) or (status == 403 and _CONTENT.search(str(error))):
            if _TOO_LONG.search(f"{code} {error.message}"):
                return PromptTooLongError(said)
            if _CONTENT.search(code) or not _MISCONFIGURED.search(code):
                return RequestRefusedError(said)
        return self.failure(said)

    async def _complete(
        self, messages: Sequence[dict[str, str]], schema: Schema, max_tokens: int
    ) -> ChatCompletion:
        sent = cast(list[ChatCompletionMessageParam], list(messages))
        while True:
            model, options = self.model, self._options(schema, max_tokens)
            try:
                reply = await self._client.chat.completions.create(
                    model=model, messages=sent, extra_body=options
                )
                self.model, self._known = model, True
                return reply
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if not (self._adapt(str(error), options) or self._shorten(model, error)):
                    raise
            except openai.NotFoundError as error:
                if not self._shorten(model, error):
                    raise

    def _options(self, schema: Schema, max_tokens: int) -> dict[str, object]:
        options: dict[str, object] = {self._length: max_tokens}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self._structured:
            form = {"name": "judgment", "strict": True, "schema": schema}
            options["response_format"] = {"type": "json_schema", "json_schema": form}
        return options

    def _adapt(self, refusal: str, asked: dict[str, object]) -> bool:
        """Drop an option that the server refused. Return True if the request may be sent again.

        vLLM names ``max_completion_tokens`` too when a prompt is too long.
        """
        if _TOO_LONG.search(refusal):
            return False
        if "response_format" in asked and _SCHEMA_REFUSED.search(refusal):
            if self._structured:
                log.warning(
                    "judge %s at %s refuses JSON schemas: the prompt alone asks for the form",
                    *(self.name, self._url),
                )
            self._structured = False
            return True
        if "max_completion_tokens" in asked and "max_completion_tokens" in refusal:
            self._length = "max_tokens"
            return True
        return False

    def _shorten(self, asked: str, error: openai.APIStatusError) -> bool:
        """Leave out the provider of an unknown model's name. Return True to send again.

        A prompt that is too long is refused with "this model's maximum context length".
        """
        if asked != self.model:  # another request changed it meanwhile
            return True
        provider, slash, rest = asked.partition("/")
        unknown = "model" in str(error).lower() and not _TOO_LONG.search(str(error))
        if self._known or not (slash and provider in _PROVIDERS and unknown):
            return False
        self.model = rest
        return True


def _answer(reply: object, messages: Sequence[dict[str, str]]) -> JudgeAnswer:
    """Read a reply, whose shape the SDK does not check: a proxy may answer 200 with anything."""
    if not isinstance(reply, ChatCompletion):
        raise _NoCompletionError
    try:
        choice = reply.choices[0] if reply.choices else None
        message = choice.message if choice else None
        text = (message.content or "") if message else ""
        if not isinstance(text, str):
            raise _NoCompletionError
        usage = reply.usage  # some servers count nothing
        asked = int((usage and usage.prompt_tokens) or 0)
        asked = asked or sum(count_tokens(message["content"]) for message in messages)
        if usage is None:
            written, thoughts, cached = count_tokens(text), 0, 0
        else:
            # Of thoughts, some servers count only the total.
            written = int(usage.completion_tokens or count_tokens(text))
            written = max(written, int(usage.total_tokens or 0) - asked)
            details = usage.completion_tokens_details
            thoughts = (details.reasoning_tokens if details else None) or 0
            of_prompt = usage.prompt_tokens_details
            cached = int((of_prompt.cached_tokens if of_prompt else None) or 0)
        if max(asked, written, cached) > _MOST_TOKENS:
            raise _NoCompletionError
        finish = choice.finish_reason if choice else None
        return JudgeAnswer(
            text=text,
            prompt_tokens=max(asked, 0),
            completion_tokens=max(written, 0),
            cut=finish == "length",
            refused=finish == "content_filter" or bool(message and message.refusal),
            cached_tokens=max(cached, 0),
            thought=thoughts > 0 or "<think" in text or hasattr(message, "reasoning_content"),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise _NoCompletionError from None


def _wait_s(headers: httpx.Headers) -> float | None:
    """Return the wait that ``Retry-After`` asks for: seconds, or a date."""
    given = headers.get("retry-after", "")
    try:
        wait_s = float(given)
        return max(wait_s, 0.0) if isfinite(wait_s) else None
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(given)
    except (ValueError, OverflowError):  # a year of twenty digits fits into no integer of C's
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudge:
    """A served checkpoint: its URL, its API key, the name of its judgments, and its context."""

    base_url: str
    api_key: str = field(repr=False)
    name: str
    context_tokens: int


@asynccontextmanager
async def local_judge(path: Path, log_file: Path) -> AsyncIterator[LocalJudge]:
    """Serve a checkpoint directory on a free port, and write the engine's output to ``log_file``.

    The engine has a secret of its own, because every user of the machine reaches its port.

    Raises:
        ServingError: the engine does not start, or the checkpoint does not load.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="babylon-judge-") as home:
        secret = engine_secret(Path(home))
        service = Service(
            name="judge",
            command=[
                *(sys.executable, "-P", "-m", "babylon.serving.engine.engine_process"),
                *(f"--port={port}", f"--home={home}"),
            ],
            log=log_file,
        )
        headers = {"Authorization": f"Bearer {secret}"}
        async with supervised(service) as engine, aiohttp.ClientSession(headers=headers) as session:
            for _ in range(round(_READY_S / _POLL_S)):
                if failure := engine.failure():
                    raise ServingError(failure)
                if await _answers(session, url):
                    break
                await asyncio.sleep(_POLL_S)
            else:
                raise ServingError(f"the judge's engine is not ready after {_READY_S:.0f} s")
            context = await _load(session, url, path)
            yield LocalJudge(
                base_url=f"{url}/v1",
                api_key=secret,
                name=f"{path.name}@{checkpoint_digest(path)}",
                context_tokens=context,
            )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.ok
    except aiohttp.ClientConnectionError:
        return False


async def _load(session: aiohttp.ClientSession, url: str, path: Path) -> int:
    body = msgspec.json.encode({"path": str(path.absolute()), "version": 0})
    try:
        async with session.put(f"{url}/policies/{MODEL}", data=body, timeout=_LOAD) as response:
            answer = msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:  # it died, of want of memory as a rule
        raise ServingError(
            f"JUDGE_MODEL_PATH={str(path)!r} does not load: its engine gave no answer"
            f" ({reason_of(error)}): see logs/judge.log, or name a smaller model"
        ) from error
    if response.status >= 400:
        raise ServingError(
            f"JUDGE_MODEL_PATH={str(path)!r} does not load: {answer['error']['message']}"
        )
    return int(answer["max_model_len"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
