"""HTTP client of a vLLM server: its models, and loading of adapters at run time.

An adapter is never loaded in place. A running sequence would change weights midway, and cached
prefixes would be those of the old weights.
"""

from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from babylon.core.errors import ServingError
from babylon.serving.openai_wire import JsonObject, RequestError, error_message

_ASK = aiohttp.ClientTimeout(total=3, sock_connect=2)
_CHAT = aiohttp.ClientTimeout(total=20, sock_connect=2)
_WORK = aiohttp.ClientTimeout(total=300, sock_connect=5)
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class VllmDownError(ServingError):
    """The server does not answer."""


class VllmModelCard(Struct, frozen=True):
    """A model that the server serves. ``parent``: name of an adapter's base model."""

    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(Struct, frozen=True):
    data: list[VllmModelCard]


class VllmClient:
    """The server at ``url``; ``secret`` is for those that the host starts.

    ``turns``: it is one on which full models take turns (``babylon_turns``).

    Every method raises ``VllmDownError`` if it does not answer, ``TimeoutError`` if it is too busy
    to answer.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, secret: str = "", *, turns: bool = False
    ) -> None:
        self.url, self.turns = url, turns
        self._http = http
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    async def cards(self) -> list[VllmModelCard]:
        """Return the models that the server serves."""
        body = await self._get("/policies" if self.turns else "/v1/models")
        try:
            return msgspec.json.decode(body, type=_Cards).data
        except msgspec.DecodeError as error:
            raise VllmDownError(f"{self.url} is not a vLLM server: {error}") from error

    def calls_at(self, name: str) -> str:
        """Return the address for calls of a model."""
        return f"{self.url}/policies/{quote(name)}" if self.turns else self.url

    async def load(self, name: str, path: str, *, experts: bool) -> None:
        """Load an adapter, or let a full model take turns.

        ``experts``: the adapter is on the experts of a mixture, all in one tensor. vLLM has models
        that keep them so (gpt-oss), and others that expect a tensor for each (Qwen3-MoE).

        Raises:
            RequestError: the server refuses the adapter.
        """
        if self.turns:
            await self._send("PUT", f"/policies/{quote(name)}", _WORK, {"path": path})
            return
        body = {"lora_name": name, "lora_path": path, "is_3d_lora_weight": experts}
        try:
            await self._send("POST", "/v1/load_lora_adapter", _WORK, body)
        except RequestError as error:
            if error.status == 404 and str(error) == "Not Found":  # the route, not the adapter
                raise RequestError(
                    400,
                    f"the vLLM server at {self.url} loads no adapters: start it with --enable-lora"
                    " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                ) from error
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter, or end a model's turns. Running answers are finished.

        Raises:
            RequestError: unknown adapter.
        """
        if self.turns:
            await self._send("DELETE", f"/policies/{quote(name)}", _WORK)
        else:
            await self._send("POST", "/v1/unload_lora_adapter", _WORK, {"lora_name": name})

    async def draw_one_token(self, model: str) -> None:
        """Draw a token, to see that the model answers, and to compile what the first call compiles.

        Raises:
            RequestError: the model cannot answer.
        """
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "logprobs": True}
        path = self.calls_at(model).removeprefix(self.url) + "/v1/chat/completions"
        await self._send("POST", path, _WORK, body)

    async def chat(self, body: JsonObject) -> JsonObject:
        """Return the answer to a chat.

        Raises:
            RequestError: the server refuses it.
        """
        answer = await self._send("POST", "/v1/chat/completions", _CHAT, body)
        return msgspec.json.decode(answer, type=JsonObject)

    async def in_flight(self) -> int:
        """Return the number of running and waiting requests."""
        families = text_string_to_metric_families((await self._get("/metrics")).decode())
        samples = [sample for family in families for sample in family.samples]
        return sum(int(sample.value) for sample in samples if sample.name in _BUSY)

    async def _get(self, path: str) -> bytes:
        try:
            return await self._send("GET", path, _ASK)
        except RequestError as error:  # it requires an API key, for example
            raise VllmDownError(f"{self.url}{path} answers {error.status}: {error}") from error

    async def _send(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, body: object = None
    ) -> bytes:
        try:
            async with self._http.request(
                method, self.url + path, json=body, timeout=timeout, headers=self._headers
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            connected = not isinstance(error, aiohttp.ServerTimeoutError)
            if isinstance(error, TimeoutError) and connected:
                raise  # the server is busy
            raise VllmDownError(
                f"the vLLM server at {self.url} does not answer"
                f" ({str(error) or type(error).__name__})"
            ) from error
        if response.status >= 400:
            raise RequestError(response.status, error_message(text))
        return text
