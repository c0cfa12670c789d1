"""ASGI middleware of the vLLM servers that the host starts. It imports nothing of babylon.

vLLM asks for its key below ``/v1`` and a few more paths. ``/invocations`` samples and ``/adapters``
loads without it (vLLM 0.32), and every user of the machine reaches loopback.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_OPEN = ("/health", "/metrics")
_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], "_Send"], Awaitable[None]]
_Send = Callable[[_Message], Awaitable[None]]


class NeedsKey:
    """Refuses a request without the key in ``VLLM_API_KEY``, whatever its path."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: _Send
    ) -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = b'{"error":{"message":"agents call the gateway","code":401}}'
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: _Message) -> bool:
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, self._wanted)
