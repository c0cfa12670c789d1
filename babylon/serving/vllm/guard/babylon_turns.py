"""ASGI middleware by which full models of one shape take turns on one vLLM server.

It imports nothing of babylon. A call for the model NAME comes to ``/policies/NAME/v1/...`` and is
answered by that model's weights alone: they are loaded into the running server when no other
model's call runs, and stay until its calls are answered. The keys and values of prefixes that
other weights computed are forgotten. vLLM must be of one API server (its default).
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

_SAMPLING = ("/v1/chat/completions", "/v1/completions")
_LONGEST_SHARE = 4  # a turn that others wait for lasts so many times as long as its load
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class Turns:
    """Gives one model at a time its turn. ``load`` puts the weights of a path into the server.

    A model without calls leaves its turn to others. One that is called all the time keeps it for
    ``_LONGEST_SHARE`` times as long as its load took, so two busy models load a fifth of the time.
    """

    def __init__(self, load: Callable[[str], Awaitable[None]]) -> None:
        self._load = load
        self._loaded: str | None = None
        self._ends = 0.0
        self._running = 0
        self._waiting = Counter[str]()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, path: str) -> AsyncIterator[None]:
        """Wait for the turn of a model, and keep it meanwhile. After a failed load, no model is
        loaded, and the next call loads its own."""
        async with self._changed:
            self._waiting[path] += 1
            try:
                await self._changed.wait_for(lambda: self._may_go(path))
                if path != self._loaded:
                    await self._switch(path)
            finally:
                self._waiting[path] -= 1
                self._changed.notify_all()
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                async with self._changed:
                    self._changed.notify_all()

    def _may_go(self, path: str) -> bool:
        if path != self._loaded:
            return not self._running
        others = self._waiting.total() - self._waiting[path]
        return not others or time.monotonic() < self._ends

    async def _switch(self, path: str) -> None:
        self._loaded, begun = None, time.monotonic()
        await self._load(path)
        self._loaded, now = path, time.monotonic()
        self._ends = now + _LONGEST_SHARE * (now - begun)


class TakesTurns:
    """Answers ``GET /policies``, ``PUT`` and ``DELETE /policies/NAME``, and calls below it."""

    def __init__(self, app: Callable[[_Message, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._paths: dict[str, str] = {}
        self._turns = Turns(self._load)
        self._engine: Any = None  # vLLM's EngineClient

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._engine = scope["app"].state.engine_client
        name, path = self._parts(scope)
        match scope["method"], scope["path"]:
            case "GET", "/policies":
                await _answer(
                    send, {"data": [{"id": n, "root": p} for n, p in self._paths.items()]}
                )
            case "PUT", _ if name:
                self._paths[name] = json.loads(await _body(receive))["path"]
                await _answer(send, {})
            case "DELETE", _ if name:
                self._paths.pop(name, None)
                await _answer(send, {})
            case _, asked if asked in _SAMPLING or (name and name not in self._paths):
                await _answer(send, {"error": {"message": f"{asked}: no such policy"}}, 404)
            case _ if f"/{path}" in _SAMPLING:
                async with self._turns.of(self._paths[name]):
                    await self._app({**scope, "path": f"/{path}"}, receive, send)
            case _:
                inner = f"/{path}" if name else scope["path"]
                await self._app({**scope, "path": inner}, receive, send)

    def _parts(self, scope: _Message) -> tuple[str, str]:
        """Return the name of a policy, which may have slashes, and the path below it."""
        _, _, rest = scope["path"].partition("/policies/")
        if scope["method"] in ("PUT", "DELETE"):
            return rest, ""
        own = [known for known in self._paths if f"{rest}/".startswith(f"{known}/")]
        name = max(own, key=len, default=rest)
        return name, rest[len(name) + 1 :]

    async def _load(self, path: str) -> None:
        await self._engine.pause_generation(mode="wait")  # for calls whose clients left
        try:
            kwargs = {"weights_path": path}
            await self._engine.collective_rpc("reload_weights", kwargs=kwargs)
            if not await self._engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache was not reset")
        finally:
            await self._engine.resume_generation()


async def _body(receive: _Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _answer(send: _Send, answer: object, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
