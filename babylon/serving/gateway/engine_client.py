"""Client of an engine: ``babylon.serving.engine_protocol`` over HTTP.

Calls go to the address that the engine gives for each policy: it may host several servers.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from babylon.core.errors import ServingError
from babylon.serving.gateway.engine_connections import EngineConnections, EngineResponse
from babylon.serving.gateway.route_table import Target
from babylon.serving.openai_wire import error_message

T = TypeVar("T")
LOAD_S, ASK_S = 600.0, 5.0
_AGAIN_S = 0.25
FIRST_CHUNK_S, NEXT_CHUNK_S, PROBE_S = 120.0, 60.0, 30.0

_JSON = "Content-Type: application/json\r\n"


class EngineDownError(ServingError):
    """The engine does not answer, answers 503, or is something else."""


class _Card(Struct, frozen=True):
    """The fields of ``engine_protocol.PolicyCard`` that say where and how a policy answers."""

    id: str = ""
    url: str | None = None
    model: str | None = None
    foreign: bool = False
    slots: int | None = None


class _Cards(Struct, frozen=True):
    data: list[_Card]


class EngineClient:
    """Loads and unloads policies of one engine with its secret, and calls them."""

    def __init__(self, connections: EngineConnections, url: str, secret: str = "") -> None:
        self._connections, self.url = connections, url
        self._headers = f"{_JSON}Authorization: Bearer {secret}\r\n"
        self._cards: dict[str, _Card] = {}

    def slots(self, name: str) -> int | None:
        """Return the number of calls that the engine samples together, ``None`` if unknown."""
        card = self._cards.get(name)
        return card.slots if card else None

    async def policies(self) -> frozenset[str]:
        """Return the names of the policies that are ready to answer."""
        try:
            body = await self._ask("GET", "/v1/models", ASK_S)
        except EngineDownError as error:
            if not isinstance(error.__cause__, ConnectionError):
                raise  # it had its time, or says itself that it cannot answer
            await asyncio.sleep(_AGAIN_S)  # one connection that fails is no silence
            body = await self._ask("GET", "/v1/models", ASK_S)
        listed = self._decoded(body, _Cards, "GET /v1/models").data
        self._cards = {card.id: card for card in listed}
        return frozenset(self._cards)

    async def load(self, target: Target) -> None:
        path = f"/policies/{quote(target.name)}"
        body = {"path": target.path, "version": target.policy_version}
        answer = await self._ask("PUT", path, LOAD_S, body)
        self._cards[target.name] = self._decoded(answer, _Card, f"PUT {path}")

    async def unload(self, name: str) -> None:
        await self._ask("DELETE", f"/policies/{quote(name)}", ASK_S)

    async def call_streamed(self, path: str, body: bytes, name: str) -> EngineResponse:
        """Send a call, and return with its first bytes, which ``arriving_bytes`` yields first.

        Raises:
            EngineDownError: no response arrived, or it broke off before its first byte.
            TimeoutError: no byte arrived within ``FIRST_CHUNK_S``.
        """
        async with asyncio.timeout(FIRST_CHUNK_S):
            response = await self.call(path, body, name)
            if response.status == 200:
                try:
                    response.begun = await response.readany()
                except ConnectionError as error:
                    response.close()
                    raise _down(self.url, error) from error
                except BaseException:
                    response.close()
                    raise
            return response

    async def call(self, path: str, body: bytes, name: str) -> EngineResponse:
        """Send a call for the policy ``name``; the caller closes the response.

        A pooled connection may be closed at the other end. The call is then sent once more: no
        byte was answered, and the second request goes to the same policy.

        Raises:
            EngineDownError: no response arrived.
        """
        card = self._cards.get(name)
        base = (card and card.url) or self.url
        if card and card.model and card.model != name:
            body = msgspec.json.encode({**msgspec.json.decode(body), "model": card.model})
        headers = _JSON if card and card.foreign else self._headers
        try:
            try:
                return await self._connections.ask("POST", base + path, headers, body)
            except ConnectionError:
                return await self._connections.ask("POST", base + path, headers, body, fresh=True)
        except OSError as error:
            raise _down(base, error) from error

    async def probe(self, name: str) -> None:
        """Ask the policy ``name`` for one token.

        Raises:
            EngineDownError: it does not answer, or with an error of its own (5xx) or 404.
        """
        asked = {"model": name, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        path = "/v1/chat/completions"
        try:
            async with asyncio.timeout(PROBE_S):
                async with await self.call(path, msgspec.json.encode(asked), name) as response:
                    body = await response.read()
        except OSError as error:
            raise _down(self.url, error) from error
        if response.status >= 500 or response.status == 404:
            raise EngineDownError(f"the engine cannot answer for {name}: {error_message(body)}")

    def _decoded(self, answer: bytes, kind: type[T], asked: str) -> T:
        """Return an answer as ``kind``.

        Raises:
            EngineDownError: it is something else, as of a proxy, or of a program in its place.
        """
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineDownError(
                f"what answers {asked} at {self.url} is no engine ({error}): correct ENGINE_URL or"
                " ENGINE_PORT"
            ) from error

    async def _ask(self, method: str, path: str, limit_s: float, body: object = None) -> bytes:
        """Send a request that is not a call. A refusal is a ``ServingError``."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(limit_s),
                await self._connections.ask(
                    method, self.url + path, self._headers, data
                ) as response,
            ):
                text = await response.read()
        except OSError as error:
            raise _down(self.url, error) from error
        if response.status == 503:
            raise EngineDownError(f"the engine cannot {method} {path} now: {error_message(text)}")
        if response.status >= 400:
            raise ServingError(f"the engine refuses {method} {path}: {error_message(text)}")
        return text


async def arriving_bytes(response: EngineResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of a streamed call as they arrive, first those that were read ahead.

    Raises:
        ConnectionError: the answer broke off.
        TimeoutError: nothing arrived for ``NEXT_CHUNK_S``.
    """
    if response.begun:
        yield response.begun
    while data := await response.readany(NEXT_CHUNK_S):
        yield data


def _down(url: str, error: BaseException) -> EngineDownError:
    return EngineDownError(
        f"the engine at {url} does not answer ({str(error) or type(error).__name__}):"
        " try again in a moment, or look at its log"
    )
