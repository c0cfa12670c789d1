"""The admin API as an ASGI application.

A change answers when every gateway has followed, however long that takes; a client that leaves
meanwhile does not stop it, and ``GET /admin/status`` tells how it goes. All state is in Postgres,
so any number of these processes may be asked, and of two changes at once one is refused (409).
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from babylon.core.api_keys import local_key
from babylon.core.errors import (
    BabylonError,
    CheckpointRefusedError,
    DatabaseError,
    ExperimentError,
    ModelError,
    RouteConflictError,
    ServingError,
)
from babylon.core.settings import Settings
from babylon.core.types import Change
from babylon.deployment.admin.bodies import Ab, Canary, Replace, Rollback, parse
from babylon.deployment.change import Order
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.deployment.status import deployment_status
from babylon.serving.gateway.asgi import (
    ClientLeft,
    Headers,
    Receive,
    Response,
    Scope,
    Send,
    read_body,
)
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.policies import list_policies
from babylon.store.routes import list_routes

log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[BabylonError], int], ...] = (  # the first that fits
    (RouteConflictError, 409),
    (ExperimentError, 409),
    (CheckpointRefusedError, 422),
    (ModelError, 404),
    (ServingError, 503),
    (DatabaseError, 503),
    (BabylonError, 400),
)

Answer = Awaitable[Any]


class Admin:
    """The ASGI application."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._keys = KeyRing(local_key(settings.home.root))
        self._reads: dict[str, Callable[[], Answer]] = {
            "/admin/status": self._status,
            "/admin/routes": self._routes,
            "/admin/policies": self._policies,
        }
        self._changes: dict[str, Callable[[bytes, str], Answer]] = {
            "/admin/replace": self._replace,
            "/admin/ab": self._ab,
            "/admin/canary": self._canary,
            "/admin/rollback": self._rollback,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        try:
            await response.json(await self._answer(scope, receive))
        except ClientLeft:
            return
        except RequestError as error:
            await _refuse(response, error)
        except BabylonError as error:
            await _refuse(response, _as_request_error(error))
        except UNREACHABLE as error:
            log.warning("%s %s: %r", scope["method"], scope["path"], error)
            problem = str(error) or type(error).__name__
            await _refuse(response, RequestError(503, f"the database does not answer: {problem}"))
        except Exception as error:  # a bug: the log has where, the client an answer in our shape
            log.exception("%s %s failed", scope["method"], scope["path"])
            if response.status is None:
                problem = f"internal error ({type(error).__name__}): see the admin API's log"
                await _refuse(response, RequestError(500, problem, code="internal"))

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/health"):
            return b'{"status":"ok"}'
        if method == "GET" and (read := self._reads.get(path)):
            await self._caller(scope, "read", "deploy")
            return _encode(await read())
        if method == "POST" and (make := self._changes.get(path)):
            caller = await self._caller(scope, "deploy")
            body = await read_body(scope, receive)
            log.info("%s asks for %s: %.500r", caller, path, body)
            return _encode(await make(body, caller))
        reads, changes = ", ".join(self._reads), ", ".join(self._changes)
        raise RequestError(
            404, f"there is no {method:.20} {path!r:.200}: GET {reads} or POST {changes}"
        )

    async def _caller(self, scope: Scope, *scopes: str) -> str:
        """The author of a change. Keys are read anew: one that was revoked is out at once.

        Raises:
            RequestError: 401, no key of ours; 403, a key for other things.
        """
        await self._keys.renew(self._store)
        return f"key {self._keys.admit(scope['headers'], *scopes).key_id}"

    async def _status(self) -> Any:
        return await deployment_status(self._store)

    async def _routes(self) -> Any:
        return {"routes": await list_routes(self._store)}

    async def _policies(self) -> Any:
        return {"policies": await list_policies(self._store)}

    async def _replace(self, body: bytes, caller: str) -> Change:
        asked = parse(body, Replace)
        order = Order(author=caller, reason=asked.reason, force=asked.force)
        return await replace_champion(self._store, self._settings, asked.policy_version, order)

    async def _ab(self, body: bytes, caller: str) -> Change:
        asked = parse(body, Ab)
        order = Order(author=caller, reason=asked.reason, force=asked.force)
        return await run_experiment(
            self._store, self._settings, "ab", asked.policy_version, asked.share, order
        )

    async def _canary(self, body: bytes, caller: str) -> Change:
        asked = parse(body, Canary)
        order = Order(author=caller, reason=asked.reason, force=asked.force)
        return await run_experiment(
            self._store, self._settings, "canary", asked.policy_version, asked.share, order
        )

    async def _rollback(self, body: bytes, caller: str) -> Change:
        order = Order(author=caller, reason=parse(body, Rollback).reason)
        return await roll_back(self._store, self._settings, order)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _as_request_error(error: BabylonError) -> RequestError:
    """``code`` is the name of the error, without its ending."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return RequestError(status, str(error), code=type(error).__name__)


async def _refuse(response: Response, error: RequestError) -> None:
    headers: Headers = []
    if error.status == 503:
        headers.append((b"retry-after", b"1"))
    if error.status in (408, 413):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    await response.json(error.body, status=error.status, headers=headers)
