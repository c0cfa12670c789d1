"""A vLLM server over HTTP: its models, and adapters that come and go at run time.

An adapter is never loaded in place: a sequence would switch weights midway, and cached prefixes
would keep the old ones.
"""

from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from babylon.core.errors import ServingError
from babylon.serving.openai_wire import RequestError

_ASK = aiohttp.ClientTimeout(total=3, sock_connect=2)
_WORK = aiohttp.ClientTimeout(total=300, sock_connect=5)
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class VllmDownError(ServingError):
    """The server does not answer."""


class VllmModelCard(Struct, frozen=True):
    """A model that is served. ``parent`` is the base's name, of an adapter."""

    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(Struct, frozen=True):
    data: list[VllmModelCard]


class VllmClient:
    """The server at ``url``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._http = http

    async def cards(self) -> list[VllmModelCard]:
        """
        Raises:
            VllmDownError: no answer.
            TimeoutError: it is too busy to answer.
        """
        body = await self._get("/v1/models")
        try:
            return msgspec.json.decode(body, type=_Cards).data
        except msgspec.DecodeError as error:
            raise VllmDownError(f"what is at {self.url} is no vLLM server: {error}") from error

    async def load(self, name: str, path: str) -> None:
        """
        Raises:
            RequestError: it refuses the adapter.
            VllmDownError: no answer.
        """
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._send("POST", "/v1/load_lora_adapter", _WORK, body)
        except RequestError as error:
            if error.status == 404 and str(error) == "Not Found":  # the route, not the adapter
                raise RequestError(
                    400,
                    f"the vLLM server at {self.url} takes no adapters: start it with --enable-lora"
                    " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                ) from error
            raise

    async def unload(self, name: str) -> None:
        """Answers that have begun are finished.

        Raises:
            RequestError: there is no such adapter.
            VllmDownError: no answer.
        """
        await self._send("POST", "/v1/unload_lora_adapter", _WORK, {"lora_name": name})

    async def draw_one_token(self, model: str) -> None:
        """Try a model out; what is compiled at the first call is compiled then.

        Raises:
            RequestError: it cannot answer.
            VllmDownError: no answer.
        """
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "logprobs": True}
        await self._send("POST", "/v1/chat/completions", _WORK, body)

    async def in_flight(self) -> int:
        """Requests that it answers or keeps waiting.

        Raises:
            VllmDownError: no answer.
        """
        lines = (await self._get("/metrics")).decode().splitlines()
        samples = [line for line in lines if line.startswith(tuple(f"{n}{{" for n in _BUSY))]
        return sum(int(float(sample.rpartition(" ")[2])) for sample in samples)

    async def _get(self, path: str) -> bytes:
        try:
            return await self._send("GET", path, _ASK)
        except RequestError as error:  # it wants a key, for example
            raise VllmDownError(f"{self.url}{path} answers {error.status}: {error}") from error

    async def _send(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, body: object = None
    ) -> bytes:
        try:
            async with self._http.request(
                method, self.url + path, json=body, timeout=timeout
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and not isinstance(
                error, aiohttp.ServerTimeoutError
            ):
                raise  # it is there, but busy
            raise VllmDownError(
                f"the vLLM server at {self.url} does not answer ({error or type(error).__name__})"
            ) from error
        if response.status >= 400:
            raise RequestError(response.status, _message(text))
        return text


def _message(body: bytes) -> str:
    """Of vLLM's error, or of the framework's below it."""
    try:
        told: Any = msgspec.json.decode(body)
        return str(told["error"]["message"] if "error" in told else told["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
