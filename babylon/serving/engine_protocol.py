"""The HTTP protocol between the gateway and an engine of any kind.

``GET /v1/models`` lists the policies that are ready to answer. ``PUT /policies/{name}`` loads a
checkpoint under an immutable name, ``DELETE`` unloads it. ``GET /health`` reports the state. Calls
for a listed policy go to its ``url`` and name its ``model``; by default these are the engine's own
address and the policy's name. ``POST /tokenize`` returns the tokens of a chat's prompt, as vLLM
does. Engines listen on loopback, or in a private network. All but ``GET`` takes the secret of the
home, as ``Authorization: Bearer SECRET``, because every local user reaches loopback.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from babylon.core.processes import exit_with_supervisor
from babylon.serving.openai_wire import MAX_BODY_BYTES, RequestError, error_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = web.AppKey("secret", str)


class PolicySource(Struct, frozen=True):
    """Body of ``PUT /policies/{name}``: a checkpoint directory and its policy version.

    ``path`` may be a reference (``home:checkpoints/…``), which the engine resolves in its own home.
    """

    path: Annotated[str, Meta(min_length=1)]
    version: int


class PolicyCard(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of ``GET /v1/models``; ``root`` is the checkpoint.

    ``foreign``: the server at ``url`` is not the home's, so it must not see the home's secret.
    ``slots``: calls of the policy that are sampled together; more wait, first come, first served.
    """

    id: str
    root: str
    version: int
    object: str = ""
    created: int = 0
    owned_by: str = ""
    url: str | None = None
    model: str | None = None
    foreign: bool = False
    slots: int | None = None


def engine_app(
    run: Callable[[web.Application], AsyncIterator[None]],
    health: Handler,
    models: Handler,
    load: Handler,
    unload: Handler,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> web.Application:
    """Return an application with the protocol's routes, which ends with its supervisor.

    ``run`` is a context of the application: it yields once between start and end.
    """
    app = web.Application(
        middlewares=[openai_errors, secret_is_needed], client_max_size=max_body_bytes
    )
    app.cleanup_ctx.extend([run, _watch_supervisor])
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_put("/policies/{name:.+}", load)
    app.router.add_delete("/policies/{name:.+}", unload)
    return app


def run_engine(
    app: web.Application,
    port: int,
    secret: str | None,
    *,
    shutdown_timeout_s: float,
    host: str = "127.0.0.1",
) -> None:
    """Serve until SIGTERM or SIGINT; without a secret, anybody who reaches the host may ask."""
    if secret:
        app[SECRET] = secret
    web.run_app(
        app,
        host=host,
        port=port,
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout_s,
        access_log=None,
        print=None,
    )


async def _watch_supervisor(app: web.Application) -> AsyncIterator[None]:
    watch = asyncio.create_task(exit_with_supervisor())
    yield
    watch.cancel()


def name_taken(name: str, known_version: int, known_path: str, path: str) -> RequestError:
    """Return the error for a load under a name that stands for another checkpoint."""
    return RequestError(
        409, f"{name!r} is version {known_version} of {known_path}: load {path} under another name"
    )


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


@web.middleware
async def secret_is_needed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse to load, unload and answer without the secret, if the engine has one."""
    if request.method != "GET" and (secret := request.app.get(SECRET)):
        sent = request.headers.get("Authorization", "")
        given = sent.encode(errors="surrogateescape")  # a header may hold any bytes
        if not hmac.compare_digest(given, f"Bearer {secret}".encode()):
            text = "this engine takes the secret in the home's engine.key: agents call the gateway"
            raise RequestError(401, text, code="invalid_api_key")
    return await handler(request)


def json_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
