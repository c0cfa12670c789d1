"""How whoever routes calls talks to an engine, whatever that engine is.

``GET /v1/models`` lists what is ready to answer, ``PUT /policies/{name}`` loads a checkpoint under
an immutable name, ``DELETE`` unloads it, ``GET /health`` says how it goes. A listed policy may
answer elsewhere (``url``) and under another name (``model``); without them it is here, under its
own. Nobody is asked who they are: engines listen on loopback.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from babylon.serving.openai_wire import RequestError, error_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PolicySource(Struct, frozen=True):
    """Body of ``PUT /policies/{name}``: a checkpoint directory and the version it is."""

    path: Annotated[str, Meta(min_length=1)]
    version: int


class PolicyCard(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of ``GET /v1/models``. ``root`` is the checkpoint."""

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
    """Every refusal in OpenAI's shape."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    except web.HTTPException as error:  # no such route, wrong method, body too large
        body = error_body(error.status, error.text or error.reason)
        return web.Response(status=error.status, body=body, content_type="application/json")


def json_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
