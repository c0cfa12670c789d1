"""Client of a judge behind an OpenAI-compatible server.

The SDK retries rate limits, server errors and lost connections with jitter, and honours
``Retry-After``. Requests use structured output and ``max_completion_tokens``, unless the server
refuses them.
"""

import asyncio
import hashlib
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import aiohttp
import msgspec
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from babylon.core.errors import ScoringError, ServingError
from babylon.core.processes import Service, supervised
from babylon.scoring.judge.prompt import Schema, count_tokens
from babylon.store.judgments import Spent

log = logging.getLogger(__name__)

RETRIES = 6
MODEL = "judge"
TEMPERATURE = 0.7
_READY_S, _POLL_S = 180.0, 0.1
_LOAD = aiohttp.ClientTimeout(total=600)
_SCHEMA_REFUSED = re.compile(
    r"response.?format|json.?schema|structured|guided|grammar", re.IGNORECASE
)


class PromptTooLongError(Exception):
    """The prompt does not fit into the judge's context."""


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
    """The text of a reply and its tokens: the server's count, or ``count_tokens`` without one."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeClient:
    """Client of one model, with at most ``concurrency`` requests at a time.

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
        self._url, self._structured, self._length = base_url, True, "max_completion_tokens"
        self._turn = asyncio.Semaphore(concurrency)
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=RETRIES, timeout=timeout_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def ask(
        self, messages: Sequence[dict[str, str]], schema: Schema, *, max_tokens: int
    ) -> JudgeAnswer:
        """Return one reply.

        Raises:
            PromptTooLongError: the prompt does not fit into the judge's context.
            ScoringError: the server refuses, or does not answer after all retries.
        """
        try:
            async with self._turn:
                reply = await self._complete(messages, schema, max_tokens)
        except openai.OpenAIError as error:
            if isinstance(error, openai.BadRequestError) and (
                error.code == "context_length_exceeded" or "context length" in str(error).lower()
            ):
                raise PromptTooLongError(str(error)) from error
            raise ScoringError(
                f"judge {self.name} at {self._url}: {str(error).rstrip('.')}; earlier judgments are"
                " stored: correct JUDGE_MODEL, JUDGE_BASE_URL or the key, or run the window again"
                " later"
            ) from error
        text = (reply.choices[0].message.content or "") if reply.choices else ""
        usage = reply.usage
        if usage is None:
            asked = sum(count_tokens(message["content"]) for message in messages)
            return JudgeAnswer(text=text, prompt_tokens=asked, completion_tokens=count_tokens(text))
        return JudgeAnswer(
            text=text, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )

    async def _complete(
        self, messages: Sequence[dict[str, str]], schema: Schema, max_tokens: int
    ) -> ChatCompletion:
        sent = cast(list[ChatCompletionMessageParam], list(messages))
        while True:
            options = self._options(schema, max_tokens)
            try:
                return await self._client.chat.completions.create(
                    model=self.model, messages=sent, extra_body=options
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if not self._adapt(str(error), options):
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
        """Drop an option that the server refused. Return True if the request may be sent again."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudge:
    """A served checkpoint: its URL, the name of its judgments, and its context."""

    base_url: str
    name: str
    context_tokens: int


@asynccontextmanager
async def local_judge(path: Path, log_file: Path) -> AsyncIterator[LocalJudge]:
    """Serve a checkpoint directory on a free port, and write the engine's output to ``log_file``.

    Raises:
        ServingError: the engine does not start, or the checkpoint does not load.
    """
    port = _free_port()
    service = Service(
        name="judge",
        command=[sys.executable, "-m", "babylon.serving.engine.engine_process", f"--port={port}"],
        log=log_file,
    )
    url = f"http://127.0.0.1:{port}"
    async with supervised(service) as engine, aiohttp.ClientSession() as session:
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
            base_url=f"{url}/v1", name=f"{path.name}@{_fingerprint(path)}", context_tokens=context
        )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.ok
    except aiohttp.ClientConnectionError:
        return False


async def _load(session: aiohttp.ClientSession, url: str, path: Path) -> int:
    body = msgspec.json.encode({"path": str(path.absolute()), "version": 0})
    async with session.put(f"{url}/policies/{MODEL}", data=body, timeout=_LOAD) as response:
        answer = msgspec.json.decode(await response.read())
    if response.status >= 400:
        raise ServingError(
            f"JUDGE_MODEL_PATH={str(path)!r} does not load: {answer['error']['message']}"
        )
    return int(answer["max_model_len"])


def _fingerprint(path: Path) -> str:
    """Return a hash of the files' names, sizes and times, because other files are another judge."""
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
    seen = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
