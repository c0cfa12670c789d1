"""The admin API as a FastAPI application.

A change answers when the gateways follow, apart from quarantined ones. A client that leaves does
not stop it; ``GET /admin/status`` shows its progress. All state is in Postgres, so several of these
processes may run. Of two changes at the same time one is refused (409).
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

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
from babylon.core.home import Home
from babylon.core.types import Change
from babylon.deployment.admin.flow_metrics import CONTENT_TYPE, flow_metrics
from babylon.deployment.change import ChangeRequest, RunChecks
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.deployment.status import Status, deployment_status
from babylon.serving.gateway.asgi import ClientLeft, read_body
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.play.app import WireError
from babylon.serving.gateway.play.events import integer
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.flow_state import read_flow_state
from babylon.store.policies import Policy, list_policies
from babylon.store.routes import Route, list_routes

log = logging.getLogger(__name__)
MOST_POLICIES = 100  # in an answer: each has its metrics, and every window may bring a policy
_STATUS: tuple[tuple[type[BabylonError], int], ...] = (  # the first match counts
    (RouteConflictError, 409),
    (ExperimentError, 409),
    (CheckpointRefusedError, 422),
    (ModelError, 404),
    (ServingError, 503),
    (DatabaseError, 503),
    (BabylonError, 400),
)
_UNREACHABLE = tuple(kind for kind in UNREACHABLE if kind is not DatabaseError)
Version = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(integer)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Rollback(BaseModel):
    """``reason`` is kept in the route's history."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    reason: Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = "admin API"

    @model_validator(mode="before")
    @classmethod
    def _decode(cls, value: object) -> object:
        """FastAPI hands on bytes when the content type is not JSON."""
        return from_json(value) if isinstance(value, bytes) else value


class Replace(Rollback):
    """``force`` skips the checks, and the history says so."""

    policy_version: Version
    force: bool = False


class Ab(Replace):
    """``share`` of the agents for the challenger, half of them by default."""

    share: Share | None = None


class Canary(Rollback):
    """Without a policy, ``share`` is the new share of the canary that runs."""

    policy_version: Version | None = None
    share: Share | None = None
    force: bool = False


class RefusedChange(BaseModel):
    """The body of every error."""

    error: WireError


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": RefusedChange}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 422, 500, 503)
}


def _admin_route(store: Store, keys: KeyRing) -> type[APIRoute]:
    class AdminRoute(APIRoute):
        """A route that checks the API key, then reads a body of bounded size."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                await keys.renew(store)  # a revoked key is refused at once
                scopes = ("read", "deploy") if request.method == "GET" else ("deploy",)
                holder = keys.admit(request.scope["headers"], *scopes)
                holder.require_all_agents("policies serve")
                request.state.caller = f"key {holder.key_id}"
                if request.method == "POST":
                    # Read here: FastAPI turns every error of its own reading into a 400.
                    request._body = body = await read_body(request.scope, request.receive) or b"{}"
                    log.info("%s asks for %s: %.500r", holder.key_id, request.url.path, body)
                return await handle(request)

            return guarded

    return AdminRoute


def admin_app(
    store: Store, home: Home, run_checks: RunChecks, *, publishes: bool = False
) -> FastAPI:
    """The application, with its schema at ``/openapi.json``. ``publishes``: PUBLISH_TO is set."""
    route = _admin_route(store, KeyRing(local_key(home.root)))
    bearer = Depends(HTTPBearer(auto_error=False))  # only for the schema: the route checks the key
    admin = APIRouter(prefix="/admin", route_class=route, dependencies=[bearer], responses=_ERRORS)

    @admin.get("/status")
    async def status() -> Status:
        """The route in force, live gateways, policies to load, and policies to approve."""
        return await deployment_status(store)

    @admin.get("/routes")
    async def routes() -> dict[str, list[Route]]:
        """The newest routes first."""
        return {"routes": await list_routes(store)}

    @admin.get("/policies")
    async def policies(before: Version | None = None) -> dict[str, list[Policy]]:
        """The newest policies, or the newest below the version ``before``; the newest is last."""
        return {"policies": await list_policies(store, MOST_POLICIES, before)}

    @admin.post("/replace")
    async def replace(asked: Replace, request: Request) -> Change:
        """Put one policy in force for every agent."""
        return await replace_champion(store, run_checks, asked.policy_version, _why(asked, request))

    @admin.post("/ab")
    async def ab(asked: Ab, request: Request) -> Change:
        """Compare a policy with the champion on a share of the agents."""
        return await run_experiment(
            store, run_checks, "ab", asked.policy_version, asked.share, _why(asked, request)
        )

    @admin.post("/canary")
    async def canary(asked: Canary, request: Request) -> Change:
        """Try a policy on few agents, or change the share of the canary that runs."""
        return await run_experiment(
            store, run_checks, "canary", asked.policy_version, asked.share, _why(asked, request)
        )

    @admin.post("/rollback")
    async def rollback(asked: Rollback, request: Request) -> Change:
        """End the experiment that runs, or put the champion before in force again."""
        return await roll_back(store, _why(asked, request))

    app = FastAPI(
        title="Babylon admin API",
        docs_url=None,  # the pages load their scripts from elsewhere
        redoc_url=None,
        exception_handlers=dict.fromkeys(
            (
                *(BabylonError, RequestValidationError, HTTPException, ClientLeft, Exception),
                *_UNREACHABLE,
            ),
            _refuse,
        ),
    )
    app.include_router(admin)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics of training for Prometheus. They need no key, because the port is on loopback."""
        flow = await read_flow_state(store)
        return Response(flow_metrics(flow, publishes=publishes), media_type=CONTENT_TYPE)

    return app


def _why(asked: Rollback, request: Request) -> ChangeRequest:
    return ChangeRequest(
        author=request.state.caller,
        reason=asked.reason,
        force=isinstance(asked, Replace | Canary) and asked.force,
    )


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error in the gateway's shape."""
    if isinstance(error, ClientLeft):
        return Response()  # nobody reads it
    refusal = _as_request_error(request, error)
    headers = dict[str, str]()
    if refusal.status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers  # the allowed methods of a 405
    if refusal.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return Response(refusal.body, refusal.status, headers, media_type="application/json")


def _as_request_error(request: Request, error: Exception) -> RequestError:
    """The refusal for an error. The code of a ``BabylonError`` is the name of its class."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BabylonError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return RequestError(status, str(error), code=type(error).__name__)
    change = request.url.path.rpartition("/")[2]
    if isinstance(error, RequestValidationError):
        problems = [
            ": ".join([*map(str, problem["loc"][1:]), problem["msg"]]) for problem in error.errors()
        ]
        return RequestError(400, f"bad {change} request: {'; '.join(problems)}")
    if isinstance(error, HTTPException) and error.status_code == 400:
        return RequestError(400, f"bad {change} request: {error.detail}")
    if isinstance(error, HTTPException):
        asked = f"{request.method:.20} {request.url.path!r:.200}"
        status = 405 if error.status_code == 405 else 404
        return RequestError(status, f"there is no {asked}: see GET /openapi.json")
    if isinstance(error, _UNREACHABLE):
        log.warning("%s %s: %r", request.method, request.url.path, error)
        problem = str(error) or type(error).__name__
        return RequestError(503, f"the database does not answer: {problem}")
    # A bug. Starlette raises the error again after this answer, and uvicorn logs its traceback.
    problem = f"internal error ({type(error).__name__}): see the admin API's log"
    return RequestError(500, problem, code="internal")
