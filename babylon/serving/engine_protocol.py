"""The HTTP protocol between the gateway and an engine of any kind.

``GET /v1/models`` lists the policies that are ready to answer. ``PUT /policies/{name}`` loads a
checkpoint under an immutable name, ``DELETE`` unloads it. ``GET /health`` reports the state. Calls
for a listed policy go to its ``url`` and name its ``model``; by default these are the engine's own
address and the policy's name. There is no authentication: engines listen on loopback.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from babylon.serving.openai_wire import RequestError, error_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PolicySource(Struct, frozen=True):
    """Body of ``PUT /policies/{name}``: a checkpoint directory and its policy version."""

    path: Annotated[str, Meta(min_length=1)]
    version: int


class PolicyCard(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of ``GET /v1/models``; ``root`` is the checkpoint."""

    id: str
    root: str
    version: int
    object: str = ""
    created: int = 0
    owned_by: str = ""
    url: str | None = None
    model: str | None = None


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into an OpenAI error response."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    except web.HTTPException as error:  # no such route, wrong method, body too large
        body = error_body(error.status, error.text or error.reason)
        return web.Response(status=error.status, body=body, content_type="application/json")


def json_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
