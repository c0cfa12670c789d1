"""The HTTP side of play: a FastAPI application below the gateway, with its OpenAPI description.

It shares the gateway's keys and its port, and takes no part in the calls of agents.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, SkipValidation, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json
from starlette.exceptions import HTTPException

from babylon.quality.decode import is_deep
from babylon.serving.gateway.asgi import ClientLeft, read_body
from babylon.serving.gateway.auth import KeyRing, Principal
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.play.events import (
    MAX_EVENTS,
    Event,
    EventResult,
    Id,
    PlayModel,
    PlayState,
)
from babylon.serving.gateway.play.handler import PlayHandler, refused
from babylon.serving.openai_wire import RequestError, decode_batch, error_body
from babylon.store.connection import UNREACHABLE

PATHS = ("/v1/events", "/v1/trajectories/", "/openapi.json")
AT_A_TIME = 4  # connections to the database; recording and routes need the others
OF_A_KEY = 3  # of these: finishes that wait for calls leave a connection to other keys
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class EventBatch(PlayModel):
    """Events, which are applied in order. A refused one does not stop the others."""

    # Each event is validated by itself, so that a bad one costs only itself.
    events: Annotated[list[SkipValidation[Event]], Field(min_length=1, max_length=MAX_EVENTS)]


class EventResults(BaseModel):
    """One result for each event, in order."""

    results: list[EventResult]


class WireError(BaseModel):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The first refused event, or why no event was read."""

    error: WireError
    results: list[EventResult] = []


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 408, 409, 413, 429, 503)
}


async def apply_all(
    handler: PlayHandler, caller: Principal, events: Sequence[object]
) -> list[EventResult]:
    """Check each event by itself and apply it; return one result for each."""
    results = []
    for raw in events:
        try:
            # In a thread: an event of megabytes takes a second, in which calls are answered.
            event = await asyncio.to_thread(_checked, raw)
        except ValidationError as error:
            results.append(refused(RequestError(400, _problems(error.errors()))))
        except PydanticSerializationError as error:
            results.append(refused(RequestError(400, f"the event is no JSON: {error}")))
        else:
            results.append(await handler.apply(caller, event))
    return results


def _checked(raw: object) -> Event:
    # Strict as JSON: no number for a time, but a text, and an integer for any number. A NaN of a
    # program (``to_store``) stays one and is refused; as null it would be no reward.
    return _EVENT.validate_json(to_json(raw, inf_nan_mode="constants"), strict=True)


def play_app(
    handler: PlayHandler, keys: KeyRing, limits: KeyLimits, public_url: str | None = None
) -> FastAPI:
    """Return the application, with its schema at ``/openapi.json``, which names ``public_url``."""
    # For the schema only: the route checks the key before anything is read.
    bearer = Depends(HTTPBearer(auto_error=False))
    router = APIRouter(
        prefix="/v1",
        route_class=_keyed_route(keys, limits),
        dependencies=[bearer],
        responses=_ERRORS,
    )

    @router.post("/events", response_model=EventResults)
    async def events(batch: EventBatch, request: Request) -> Response:
        """Record starts, steps, finishes, feedback and outcomes. All may be sent again.

        The status is 200, or that of the first refused event; the results tell of each.
        """
        return _answer(await apply_all(handler, request.state.caller, batch.events))

    @router.get("/trajectories/{trajectory_id:path}")
    async def trajectory(trajectory_id: Annotated[Id, Path()], request: Request) -> PlayState:
        """A trajectory of this key as far as it is stored."""
        return await handler.state(request.state.caller, trajectory_id)

    app = FastAPI(
        title="Babylon play API",
        version="1",
        servers=[{"url": public_url}] if public_url else None,
        docs_url=None,  # the pages load their scripts from elsewhere
        redoc_url=None,
        exception_handlers=dict.fromkeys(
            (RequestError, RequestValidationError, HTTPException, ClientLeft, *UNREACHABLE),
            _refuse,
        ),
    )
    app.include_router(router)
    return app


def _keyed_route(keys: KeyRing, limits: KeyLimits) -> type[APIRoute]:
    slots = asyncio.Semaphore(AT_A_TIME)
    of_keys = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(OF_A_KEY))

    class KeyedRoute(APIRoute):
        """A route that checks the API key and its requests, and waits for a place before it reads a
        body of bounded size and depth. A decoded body takes many times its size."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                request.state.caller = keys.admit(request.scope["headers"], "record")
                limits.count_request(request.state.caller)
                async with of_keys[request.state.caller.key_id]:
                    # A body that arrives slowly takes a place of its key, and of no other.
                    posted = request.method == "POST"
                    body = await read_body(request.scope, request.receive) if posted else b""
                    async with slots:
                        if posted:
                            await _decode(request, body)
                        return await handle(request)

            return guarded

    return KeyedRoute


async def _decode(request: Request, body: bytes) -> None:
    """Decode the body for FastAPI, which does not do it again."""
    # In a thread: a large body takes a second, in which other calls must be answered.
    request._body, request._json = body, await asyncio.to_thread(_decoded, body)
    # FastAPI hands on bytes when the content type is not JSON's.
    request.scope["headers"] = [
        *(one for one in request.scope["headers"] if one[0] != b"content-type"),
        (b"content-type", b"application/json"),
    ]


def _decoded(body: bytes) -> object:
    try:
        events = decode_batch(body)
        if not is_deep(body.decode()):
            return events
        problem = "nested too deep"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error)
    raise RequestError(400, f"the body is not the JSON of events: {problem}")


def _answer(results: list[EventResult]) -> Response:
    failed = next((result for result in results if result.error), None)
    body: dict[str, object] = {"results": [one.model_dump() for one in results]}
    if failed:
        about = error_body(failed.status, failed.error or "", failed.code)
        body |= msgspec.json.decode(about, type=dict[str, object])
    status = failed.status if failed else 200
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _problems(errors: Sequence[ErrorDetails]) -> str:
    return "; ".join(
        ": ".join([".".join(map(str, problem["loc"])), problem["msg"]]) for problem in errors[:5]
    )


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error in the gateway's shape."""
    if isinstance(error, ClientLeft):
        return Response()  # nobody reads it
    headers = dict((isinstance(error, HTTPException) and error.headers) or {})  # 405 has Allow
    if isinstance(error, RequestValidationError):
        error = RequestError(400, f"bad request: {_problems(error.errors())}")
    elif isinstance(error, HTTPException):
        error = RequestError(error.status_code, f"{error.detail}: see GET /openapi.json")
    elif not isinstance(error, RequestError):
        error = RequestError(503, f"the database does not answer ({type(error).__name__})")
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s)
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return Response(error.body, error.status, headers, media_type="application/json")
