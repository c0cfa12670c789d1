"""The gateway: an OpenAI endpoint in front of the engine that records each call it answers.

A pure ASGI application. A request takes the route once; its answer comes from that policy version
alone, names it in ``x-model-version``, and ends only when the call is on the disk.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.serving.gateway.arm_pins import Pins
from babylon.serving.gateway.asgi import ClientLeft, Headers, Receive, Response, Scope, Send
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.calls import Calls
from babylon.serving.gateway.dialects import DIALECTS
from babylon.serving.gateway.engine_client import Engine
from babylon.serving.gateway.follower import Follower
from babylon.serving.gateway.gateway_metrics import CONTENT_TYPE, Metrics
from babylon.serving.gateway.limits import Limits
from babylon.serving.gateway.loader import Loader
from babylon.serving.gateway.recording import CallRecorder
from babylon.serving.gateway.route_table import RouteTable
from babylon.serving.gateway.shipping import Shipper
from babylon.serving.openai_wire import RequestError, sse
from babylon.store import Store


class Gateway:
    """The ASGI application."""

    def __init__(self, calls: Calls, shipper: Shipper) -> None:
        self._calls, self._shipper = calls, shipper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        try:
            await self._dispatch(scope, receive, response)
        except ClientLeft:
            return
        except RequestError as error:
            await self._refuse(response, error)

    async def _dispatch(self, scope: Scope, receive: Receive, response: Response) -> None:
        match scope["method"], scope["path"]:
            case "POST", path if dialect := DIALECTS.get(path):
                await self._calls.serve(scope, receive, response, dialect)
            case "GET", "/v1/models":
                self._calls.keys.admit(scope["headers"], "infer", "read")
                await response.json(self._models())
            case "GET", "/metrics":
                self._calls.keys.admit(scope["headers"], "read")
                text = self._calls.metrics.text(self._gauges())
                await response.whole(text, content_type=CONTENT_TYPE)
            case "GET", "/health/live":
                await response.json(b'{"status":"ok"}')
            case "GET", "/health" | "/health/ready":
                await self._health(response)
            case method, path:
                raise RequestError(
                    404, f"there is no {method} {path!r:.200}: see /v1/chat/completions"
                )

    def _models(self) -> bytes:
        route = self._calls.table.route
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "babylon"}
            for name in (route.targets if route else ())
        ]
        return msgspec.json.encode({"object": "list", "data": data})

    async def _health(self, response: Response) -> None:
        table, follower = self._calls.table, self._calls.follower
        unavailable = "no policy" if follower.no_policy else "unavailable"
        route, split = table.route, table.route.split if table.route else None
        body = {
            "status": unavailable if table.unavailable else "ok",
            "reason": table.unavailable or follower.problem or self._calls.recorder.problem,
            "model": route.champion.name if route else None,
            "challenger": split.challenger.name if split else None,
            "share": split.share if split else None,
            "route_version": route.route_version if route else None,
        }
        status = 503 if table.unavailable else 200
        await response.json(msgspec.json.encode(body), status=status)

    def _gauges(self) -> dict[str, float]:
        table, recorder = self._calls.table, self._calls.recorder
        return {
            "babylon_ready": float(table.unavailable is None),
            "babylon_route_version": table.route.route_version if table.route else 0,
            "babylon_calls_in_flight": table.in_flight.total(),
            "babylon_calls_waiting": self._calls.limits.waiting,
            "babylon_recording_ok": float(recorder.problem is None),
            "babylon_recording_backlog_bytes": self._shipper.backlog_bytes,
            "babylon_recorded_calls": self._shipper.shipped_calls,
            "babylon_unrecorded_calls": recorder.lost,
        }

    async def _refuse(self, response: Response, error: RequestError) -> None:
        """An error in OpenAI's shape: the response's status, or a stream's last event."""
        if response.status is not None:
            await response.write(sse(error.body), last=True)
            return
        self._calls.metrics.refused(error.status)
        headers: Headers = []
        if error.status in (429, 503):
            headers.append((b"retry-after", b"1"))
        if error.status in (408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await response.json(error.body, status=error.status, headers=headers)


@asynccontextmanager
async def open_gateway(
    store: Store, settings: Settings, *, engine_url: str, gateway_id: str, url: str
) -> AsyncIterator[Gateway]:
    """A gateway that follows the store's routes and records into it while the block runs."""
    shipper = Shipper(store, settings.home.recording)
    recorder = CallRecorder(
        shipper, settings.home.recording, settings.serving.recording, gateway_id
    )
    keys, table, pins = KeyRing(local_key(settings.home.root)), RouteTable(), Pins(store)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    ) as session:
        engine = Engine(session, engine_url)
        loader = Loader(store, engine, table, settings.model.name)
        follower = Follower(
            *(store, loader, table, keys, recorder),
            alias=settings.model.name,
            gateway=gateway_id,
            url=url,
        )
        calls = Calls(
            engine=engine,
            table=table,
            pins=pins,
            follower=follower,
            recorder=recorder,
            keys=keys,
            limits=Limits(settings.serving.max_concurrency, settings.serving.max_queue),
            metrics=Metrics(),
        )
        records = (recorder.run(), shipper.run())
        routes = (loader.run(), follower.run(), follower.give_signs_of_life(), pins.run())
        work = (*records, *routes)
        try:
            async with asyncio.TaskGroup() as group:  # should a loop ever die, so does the gateway
                loops = [group.create_task(loop) for loop in work]
                yield Gateway(calls, shipper)
                for loop in loops:
                    loop.cancel()
        finally:
            await recorder.close()
        await follower.leave()
