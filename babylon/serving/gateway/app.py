"""The gateway: an OpenAI endpoint in front of the engine that records every call it answers.

A pure ASGI application. Each request reads the route once and is answered by one policy version,
which ``x-model-version`` names. The answer ends after its call is on the disk.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import msgspec
from fastapi import FastAPI

from babylon.core.api_keys import engine_secret, local_key, new_key
from babylon.core.home import Home
from babylon.core.probes import IDENTITY_PATH
from babylon.core.settings import ServingSettings
from babylon.serving.gateway.arm_pins import ArmPins
from babylon.serving.gateway.asgi import ClientLeft, Headers, Receive, Response, Scope, Send
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.calls import CallHandler
from babylon.serving.gateway.dialects.messages import Messages, MessageTokens
from babylon.serving.gateway.dialects.responses import Responses, ResponseTokens
from babylon.serving.gateway.dialects.translation import TOKENIZE, Application, Dialects
from babylon.serving.gateway.engine_client import EngineClient
from babylon.serving.gateway.engine_connections import EngineConnections
from babylon.serving.gateway.engine_pool import EnginePool
from babylon.serving.gateway.exchange import DIALECTS
from babylon.serving.gateway.follower import RouteFollower
from babylon.serving.gateway.gateway_metrics import CONTENT_TYPE, GatewayMetrics
from babylon.serving.gateway.handover import Handover
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.last_known import LastKnownFile
from babylon.serving.gateway.limits import CallLimits
from babylon.serving.gateway.loader import PolicyLoader
from babylon.serving.gateway.play import app as play
from babylon.serving.gateway.play.callers import Callers
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.serving.gateway.play.owners import TrajectoryOwners
from babylon.serving.gateway.play.sessions import Sessions
from babylon.serving.gateway.readiness import State
from babylon.serving.gateway.recording import CallRecorder
from babylon.serving.gateway.route_table import RouteTable
from babylon.serving.gateway.shipping import Shipper
from babylon.serving.gateway.telemetry import receiver
from babylon.serving.gateway.telemetry.receiver import TraceReceiver
from babylon.serving.gateway.telemetry.tracing import tracer_for
from babylon.serving.gateway.token_counts import tokenize
from babylon.serving.gateway.worker_metrics import SharedMetrics
from babylon.serving.gateway.workers import Worker
from babylon.serving.openai_wire import RequestError, sse
from babylon.store import Store
from babylon.store.call_partitions import keep_ahead

log = logging.getLogger(__name__)
_END_S = 5.0  # that calls have to be recorded when the gateway stops
_MAX_NONCE = 128  # characters
_KEPT = "gateways keep no answers; send the conversation so far with each call"
_ABSENT = {  # paths of the official clients that have no equivalent
    "/v1/responses/": _KEPT,
    "/v1/conversations": _KEPT,
    "/v1/chat/completions/": _KEPT,
    "/v1/messages/batches": "send each request to /v1/messages",
    "/v1/batches": "send each request by itself",
    "/v1/files": "send the content in the messages",
    "/v1/embeddings": "a policy makes no embeddings",
}


class Gateway:
    """The ASGI application."""

    def __init__(
        self,
        calls: CallHandler,
        follower: RouteFollower,
        shipper: Shipper,
        play: FastAPI,
        traces: TraceReceiver,
        workers: int,
    ) -> None:
        self._calls, self._follower, self._play, self._traces = calls, follower, play, traces
        self._add_gauges(calls, shipper, workers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send)
        try:
            await self._dispatch(scope, receive, response)
        except ClientLeft:
            return
        except RequestError as error:
            await self._refuse(response, error)
        except Exception as error:
            log.exception("a request failed in the gateway")
            reason = f"{type(error).__name__} in the gateway: its log says where"
            await self._refuse(response, RequestError(500, reason))

    async def _dispatch(self, scope: Scope, receive: Receive, response: Response) -> None:
        match scope["method"], scope["path"]:
            case "POST", path if dialect := DIALECTS.get(path):
                await self._calls.serve(scope, receive, response, dialect)
            case "POST", path if path == TOKENIZE:
                await tokenize(self._calls, scope, receive, response)
            case _, path if path.startswith(play.PATHS):
                await self._play(scope, receive, response.send)
            case "POST", receiver.PATH:
                await self._traces.receive(scope, receive, response)
            case "GET", "/v1/models":
                self._calls.keys.admit(scope["headers"], "infer", "read")
                await response.whole(self._models())
            case "GET", path if path.startswith("/v1/models/"):
                self._calls.keys.admit(scope["headers"], "infer", "read")
                await response.whole(self._model(path.removeprefix("/v1/models/")))
            case "GET", "/metrics":
                self._calls.keys.admit(scope["headers"], "read")
                await response.whole(self._calls.metrics.text(), content_type=CONTENT_TYPE)
            case "GET" | "HEAD", "/health/live":  # uvicorn leaves out the body of an answer to HEAD
                await response.whole(b'{"status":"ok"}')
            # No key is needed: a proof shows nothing to a caller without the gateway's own key.
            case "GET", path if path == IDENTITY_PATH:
                nonce = scope["query_string"].decode("latin-1").removeprefix("nonce=")
                proof = self._follower.proof(nonce[:_MAX_NONCE]).encode()
                await response.whole(proof, content_type=b"text/plain")
            case "GET" | "HEAD", "/health" | "/health/ready":
                await self._health(scope, response)
            case method, path:
                remedy = next((why for start, why in _ABSENT.items() if path.startswith(start)), "")
                remedy = remedy or "see /v1/chat/completions"
                raise RequestError(404, f"unknown path {method} {path!r:.200}: {remedy}")

    def _models(self) -> bytes:
        cards = list(self._cards().values())
        ids = [card["id"] for card in cards]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return msgspec.json.encode({"object": "list", "data": cards, "has_more": False, **ends})

    def _model(self, name: str) -> bytes:
        try:
            return msgspec.json.encode(self._cards()[name])
        except KeyError:
            raise RequestError(
                404, f"model {name!r:.200}: see /v1/models", code="model_not_found"
            ) from None

    def _cards(self) -> dict[str, dict[str, object]]:
        """Return the models by name, with the fields of OpenAI's and of Anthropic's clients."""
        route = self._calls.table.route
        return {
            name: {
                **{"id": name, "object": "model", "created": 0, "owned_by": "babylon"},
                **{"type": "model", "display_name": name, "lifecycle": "active"},
                "created_at": "1970-01-01T00:00:00Z",
            }
            for name in (route.targets if route else ())
        }

    async def _health(self, scope: Scope, response: Response) -> None:
        """Tell the state, and to a key with the scope ``read`` also the route and the reason.

        A reason may name addresses and paths, and agents must not know of an experiment.
        """
        table, ready = self._calls.table, self._calls.table.readiness
        others = self._follower.problem or self._calls.recorder.problem
        unavailable = State.NO_POLICY if ready.state is State.NO_POLICY else "unavailable"
        route, split = table.route, table.route.split if table.route else None
        body: dict[str, object] = {
            "status": unavailable if ready.unavailable else "ok",
            "state": ready.state,
        }
        more = {
            "reason": ready.reason if ready.state is not State.SERVING else others,
            "model": route.champion.name if route else None,
            "challenger": split.challenger.name if split else None,
            "share": split.share if split else None,
            "route_version": route.route_version if route else None,
        }
        with suppress(RequestError):
            self._calls.keys.admit(scope["headers"], "read")
            body |= more
        status = 503 if ready.unavailable else 200
        await response.whole(msgspec.json.encode(body), status=status)

    def _add_gauges(self, calls: CallHandler, shipper: Shipper, workers: int) -> None:
        add, table, recorder = calls.metrics.add_gauge, calls.table, calls.recorder
        add("gateway_workers", "Processes that this gateway should have.", lambda: workers)
        version = "Version of the route in force, 0 if there is none."
        add("ready", "1 if calls are served.", lambda: table.readiness.unavailable is None)
        add("route_version", version, lambda: table.route.route_version if table.route else 0)
        add("calls_in_flight", "Calls being answered.", table.in_flight.total)
        waiting = "Calls waiting for their turn at a policy."
        add("calls_waiting", waiting, lambda: calls.limits.waiting)
        add("recording_ok", "1 if the disk takes calls.", lambda: recorder.problem is None)
        backlog = "Recorded calls that are not in the database yet."
        add("recording_backlog_bytes", backlog, lambda: shipper.backlog_bytes)
        states = "1 for the state of the gateway, as /health tells it."
        calls.metrics.add_states("gateway_state", states, State, lambda: table.readiness.state)
        count = calls.metrics.add_counter
        count("recorded_calls", "Calls written to the database.", lambda: shipper.shipped_calls)
        count("unrecorded_calls", "Calls served without a record.", lambda: recorder.lost)

    async def _refuse(self, response: Response, error: RequestError) -> None:
        """Send an OpenAI error: as the response, or as the last event of a stream."""
        if response.status is not None:
            await response.write(sse(error.body), last=True)
            return
        self._calls.metrics.refused(error.status)
        headers: Headers = []
        if error.status in (429, 503):
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.status in (408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await response.whole(error.body, status=error.status, headers=headers)


@asynccontextmanager
async def open_gateway(
    store: Store,
    home: Home,
    serving: ServingSettings,
    *,
    alias: str,
    engine_url: str,
    gateway_id: str,
    url: str,
    minutes: int = 60,
    last_known: LastKnownFile | None = None,
    table: RouteTable | None = None,
    worker: Worker | None = None,
) -> AsyncIterator[Application]:
    """Run a gateway that follows the store's routes and records calls into the store.

    Args:
        alias: model name in requests that the route answers.
        engine_url: base URL of the engine, or of several, separated by commas.
        url: address at which deployments, from any machine, reach this gateway and no other.
        minutes: length of windows, for play that comes over HTTP.
        last_known: file that is served from while the database is away at the start.
        table: holds the route and the readiness of this gateway.
        worker: this process, if it is one of several of its gateway.
    """
    shipper = Shipper(store, home.recording)
    recorder = CallRecorder(shipper, home.recording, serving.recording, gateway_id)
    probe_key = new_key("probe")
    keys, pins = KeyRing(local_key(home.root), probe_key), ArmPins(store)
    table = table or RouteTable()
    owners, key_limits = TrajectoryOwners(store), KeyLimits(store, gateway_id)
    sessions = Sessions(store) if serving.recognise_sessions else None
    tracer = tracer_for(serving, gateway_id)
    with closing(EngineConnections()) as connections:
        secret = engine_secret(home.root)
        engine = EnginePool(EngineClient(connections, one, secret) for one in engine_url.split(","))
        loader = PolicyLoader(store, engine, table, alias)
        follower = RouteFollower(
            *(store, loader, table, keys, recorder),
            alias=alias,
            gateway=gateway_id,
            url=url,
            probe_key=str(probe_key),
            last_known=last_known,
        )
        calls = CallHandler(
            engine=engine,
            table=table,
            pins=pins,
            loader=loader,
            recorder=recorder,
            keys=keys,
            callers=Callers(owners, sessions, alias),
            limits=CallLimits(serving.max_concurrency, serving.max_queue, key_limits),
            metrics=GatewayMetrics(),
            tracer=tracer,
        )
        plays = PlayHandler(store, minutes, recorder.rules)
        play_api = play.play_app(plays, keys, key_limits, serving.public_url)
        traces = TraceReceiver(store, plays, keys, key_limits)
        routes = (loader.run(), follower.run(), follower.announce_repeatedly(), pins.run())
        background = [recorder.run(), shipper.run(), key_limits.run(), keep_ahead(store)]
        others = [sessions, Handover(home, shipper) if home.store else None]
        optional = [one.run() for one in others if one]
        work = [*background, owners.run(), traces.run(), *routes, *optional]
        try:
            async with asyncio.TaskGroup() as group:  # a bug in any loop ends the gateway
                loops = [group.create_task(loop) for loop in work]
                processes = len(worker.ports) if worker else 1
                gateway = Gateway(calls, follower, shipper, play_api, traces, processes)
                app = Dialects(gateway, Responses, ResponseTokens, Messages, MessageTokens)
                yield SharedMetrics(app, worker) if worker else app
                await _until_answered(table)
                for loop in loops:
                    loop.cancel()
        finally:
            stored = await recorder.close()
            if tracer:
                await tracer.close()
        await follower.leave(stored)


async def _until_answered(table: RouteTable) -> None:
    """Wait for calls that uvicorn cancelled: it does not wait until they are recorded."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while table.in_flight.total():
                await asyncio.sleep(0.01)
