"""The gateway: an OpenAI endpoint in front of the engine that records each call it answers.

A pure ASGI application. A request takes the route once; its answer comes from that policy version
alone, names it in ``x-model-version``, and ends only when the call is committed to Postgres.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from babylon.errors import DatabaseError
from babylon.gateway.asgi import (
    EVENT_STREAM,
    ClientLeft,
    Headers,
    Receive,
    Response,
    Scope,
    Send,
    read_body,
    unless_client_leaves,
)
from babylon.gateway.engine import Engine, EngineDownError
from babylon.gateway.exchange import Exchange, Identity
from babylon.gateway.follower import Follower
from babylon.gateway.recording import CallRecorder
from babylon.gateway.routes import Route, RouteTable, Target
from babylon.gateway.stream import StreamCut, relay
from babylon.store import Store
from babylon.wire import RequestError, decode_object, parse_chat, sse

_BROKEN_OFF = (StreamCut, msgspec.DecodeError, aiohttp.ClientError, TimeoutError)
RETRY_AFTER: tuple[bytes, bytes] = (b"retry-after", b"1")


class Gateway:
    """The ASGI application."""

    def __init__(
        self, engine: Engine, table: RouteTable, follower: Follower, recorder: CallRecorder
    ) -> None:
        self._engine, self._table = engine, table
        self._follower, self._recorder = follower, recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        try:
            await self._dispatch(scope, receive, response)
        except ClientLeft:
            return
        except RequestError as error:
            await _refuse(response, error)

    async def _dispatch(self, scope: Scope, receive: Receive, response: Response) -> None:
        match scope["method"], scope["path"]:
            case "POST", "/v1/chat/completions":
                await self._chat(scope, receive, response)
            case "GET", "/v1/models":
                await response.json(self._models())
            case "GET", "/health":
                await self._health(response)
            case method, path:
                raise RequestError(404, f"there is no {method} {path}: see /v1/chat/completions")

    def _models(self) -> bytes:
        route = self._table.route
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "babylon"}
            for name in (route.targets if route else ())
        ]
        return msgspec.json.encode({"object": "list", "data": data})

    async def _health(self, response: Response) -> None:
        route, reason = self._table.route, self._table.unavailable
        unavailable = "no policy" if self._follower.no_policy else "unavailable"
        body = {
            "status": unavailable if reason else "ok",
            "reason": reason or self._follower.problem,
            "model": route.current.name if route else None,
            "route_version": route.route_version if route else None,
        }
        await response.json(msgspec.json.encode(body), status=503 if reason else 200)

    async def _chat(self, scope: Scope, receive: Receive, response: Response) -> None:
        fields = decode_object(await read_body(receive))
        chat = parse_chat(fields)
        identity = Identity.of(scope["headers"], chat)
        with self._table.take(chat.model) as (route, target):
            exchange = Exchange(
                call_id=uuid.uuid4().hex,
                identity=identity,
                chat=chat,
                fields=fields,
                route=route,
                target=target,
            )
            try:
                await unless_client_leaves(receive, self._answer(exchange, response))
            except ClientLeft:
                await self._record_part(exchange, "the client left")
                raise
            except _BROKEN_OFF as error:
                reason = f"the engine's answer broke off ({error or type(error).__name__})"
                await self._record_part(exchange, reason)
                self._follower.suspect(reason)
                raise RequestError(502, f"{reason}: try again") from error

    async def _answer(self, exchange: Exchange, response: Response) -> None:
        """Ask the engine, pass its answer on, and record the call before the answer's end."""
        headers = _attribution(exchange.call_id, exchange.route, exchange.target)
        try:
            upstream = await self._engine.chat(exchange.upstream_body())
        except EngineDownError as error:
            self._follower.suspect(str(error))
            raise RequestError(503, str(error), code="unavailable") from error
        async with upstream:
            if upstream.status != 200:
                await self._pass_error_on(upstream, response, headers)
            elif exchange.chat.stream:
                await response.start(200, [*EVENT_STREAM, *headers])
                end = await relay(upstream.content.iter_any(), exchange, response.write)
                await self._record(exchange)
                await response.write(end, last=True)
            else:
                answer = exchange.take(msgspec.json.decode(await upstream.read()))
                await self._record(exchange)
                await response.json(msgspec.json.encode(answer), headers=headers)

    async def _pass_error_on(
        self, upstream: aiohttp.ClientResponse, response: Response, headers: Headers
    ) -> None:
        """The engine's refusal is the client's, but for a policy that an engine has lost."""
        body = await upstream.read()
        if upstream.status == 404:
            reason = "the engine was restarted and loads its policies"
            self._follower.suspect(reason)
            raise RequestError(503, f"{reason}: try again", code="unavailable")
        await response.json(body, status=upstream.status, headers=headers)

    async def _record(self, exchange: Exchange) -> None:
        """
        Raises:
            RequestError: 503, the call is not committed, so its answer must not end well.
        """
        try:
            await self._recorder.record(exchange.record())
        except DatabaseError as error:
            self._follower.suspect(str(error))
            raise RequestError(503, str(error), code="unavailable") from error

    async def _record_part(self, exchange: Exchange, reason: str) -> None:
        """An answer that broke off is kept where there is something of it, but never trained on."""
        if exchange.token_ids:
            with contextlib.suppress(DatabaseError):  # logged there; nobody waits for an answer
                await self._recorder.record(exchange.record(interrupted=reason))


@asynccontextmanager
async def open_gateway(
    store: Store, *, engine_url: str, alias: str, gateway_id: str, url: str
) -> AsyncIterator[Gateway]:
    """A gateway that follows the store's routes and records into it while the block runs."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,  # should a loop ever die, the gateway dies with it
    ):
        engine, table, recorder = Engine(session, engine_url), RouteTable(), CallRecorder(store)
        follower = Follower(store, engine, table, alias=alias, gateway=gateway_id, url=url)
        loops = [group.create_task(recorder.run()), group.create_task(follower.run())]
        yield Gateway(engine, table, follower, recorder)
        for loop in loops:
            loop.cancel()
    await follower.leave()


def _attribution(call_id: str, route: Route, target: Target) -> Headers:
    return [
        (b"x-model-version", str(target.policy_version).encode()),
        (b"x-route-version", str(route.route_version).encode()),
        (b"x-call-id", call_id.encode()),
    ]


async def _refuse(response: Response, error: RequestError) -> None:
    """An error in OpenAI's shape: the response's status, or a stream's last event."""
    if response.started:
        await response.write(sse(error.body), last=True)
    else:
        again = [RETRY_AFTER] if error.status == 503 else []
        await response.json(error.body, status=error.status, headers=again)
