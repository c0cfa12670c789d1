"""One call, from the client's request to the last byte of its answer.

All checks that may refuse a call run before the engine is asked. After that, the call is recorded
with its whole answer, or as interrupted with the part that arrived.
"""

import contextlib
import secrets
from dataclasses import dataclass

import msgspec

from babylon.serving.gateway.arm_pins import ArmPins
from babylon.serving.gateway.asgi import (
    EVENT_STREAM,
    ClientLeft,
    Receive,
    Response,
    Scope,
    read_body,
    unless_client_leaves,
)
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.engine_client import EngineDownError, arriving_bytes
from babylon.serving.gateway.engine_errors import error_body_of, unanswered
from babylon.serving.gateway.engine_pool import EnginePool
from babylon.serving.gateway.event_stream import StreamCut, decoded, noted, relay
from babylon.serving.gateway.exchange import Dialect, Exchange
from babylon.serving.gateway.gateway_metrics import GatewayMetrics
from babylon.serving.gateway.limits import CallLimits
from babylon.serving.gateway.loader import PolicyLoader
from babylon.serving.gateway.play.callers import Callers
from babylon.serving.gateway.recording import CallRecorder
from babylon.serving.gateway.recording_rules import UNRECORDED
from babylon.serving.gateway.route_table import RouteTable
from babylon.serving.gateway.telemetry.tracing import CallTracer
from babylon.serving.openai_wire import RequestError, decode_object

TOTAL_S = 900.0  # of a call, from entering the queue to the last byte
_BROKEN_OFF = (StreamCut, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHandler:
    """Serves calls with the parts of one gateway."""

    engine: EnginePool
    table: RouteTable
    pins: ArmPins
    loader: PolicyLoader
    recorder: CallRecorder
    keys: KeyRing
    callers: Callers
    limits: CallLimits
    metrics: GatewayMetrics
    tracer: CallTracer | None

    async def serve(
        self, scope: Scope, receive: Receive, response: Response, dialect: Dialect
    ) -> None:
        """Answer a call and record it; raise ``RequestError`` or ``ClientLeft``."""
        principal = self.keys.admit(scope["headers"], "infer")
        with self.limits.keys.admitted(principal):
            fields = decode_object(await read_body(scope, receive))
            asked = dialect.parse(fields)
            identity = await self.callers.identify(scope["headers"], asked, principal)
            call_id = secrets.token_hex(16)
            unit = identity.trajectory_id or call_id
            # Before the engine works for it: an answer that cannot be recorded is not sent.
            if not self.recorder.admit(principal.key_id, identity.agent_id, unit):
                call_id = UNRECORDED + call_id
            key = identity.agent_id or principal.key_id
            pin = await self.pins.pin(self.table, asked.model, key, identity.named)
            with self.table.take(asked.model, key, pin) as assigned:
                exchange = Exchange(
                    call_id=call_id,
                    identity=identity,
                    request=asked,
                    fields=fields,
                    dialect=dialect,
                    assigned=assigned,
                    key_id=principal.key_id,
                )
                await self._counted(exchange, scope, receive, response)

    async def _counted(
        self, exchange: Exchange, scope: Scope, receive: Receive, response: Response
    ) -> None:
        outcome = "500"
        try:
            await self._answer_or_record_interruption(exchange, receive, response)
            outcome = str(response.status)
            self.table.readiness.call_ended(exchange.assigned.target.name, response.status)
        except RequestError as error:
            outcome = str(error.status)
            raise
        except ClientLeft:
            outcome = "left"
            raise
        finally:
            self.metrics.called(exchange, outcome)
            self.limits.keys.spend(exchange)
            if self.tracer:
                self.tracer.called(exchange, outcome, scope)

    async def _answer_or_record_interruption(
        self, exchange: Exchange, receive: Receive, response: Response
    ) -> None:
        try:
            await unless_client_leaves(receive, self._answer(exchange, response), TOTAL_S)
        except ClientLeft:
            # uvicorn reports a disconnect also after the last byte of a complete response
            if not response.complete:
                await self._record_interrupted(exchange, "the client left")
                raise
        except _BROKEN_OFF as error:
            reason = f"the engine's answer broke off ({str(error) or type(error).__name__})"
            await self._record_interrupted(exchange, reason)
            self.table.readiness.call_failed(exchange.assigned.target.name, reason)
            status = 504 if isinstance(error, TimeoutError) else 502
            quoted = f": {error.quoted}" if isinstance(error, StreamCut) and error.quoted else ""
            raise RequestError(status, f"{reason}{quoted}: try again") from error
        except RequestError:
            raise
        except BaseException:  # a defect of the gateway, or its end: what was sampled is kept
            await self._record_interrupted(exchange, "the gateway failed or stopped")
            raise

    async def _answer(self, exchange: Exchange, response: Response) -> None:
        """Ask the engine, relay its answer, and record the call before the answer ends.

        A call that cannot be written to the disk is a ``RequestError``: its answer must not end
        well.
        """
        name = exchange.assigned.target.name
        slots, answers = self.engine.slots(name), exchange.request.choices
        async with self.limits.for_version(name, exchange.key_id, slots, answers):
            headers = exchange.attribution
            try:
                send = self.engine.call_streamed if exchange.request.stream else self.engine.call
                upstream = await send(exchange.dialect.path, exchange.upstream_body(), name)
            except EngineDownError as error:
                self.table.readiness.call_failed(exchange.assigned.target.name, str(error))
                self.loader.look()
                raise unanswered(error) from error
            async with upstream:
                if upstream.status != 200:
                    body = await error_body_of(upstream, name, self.loader)
                    await response.whole(body, status=upstream.status, headers=headers)
                elif exchange.request.stream:
                    await response.start(200, [*EVENT_STREAM, *headers])
                    end = await relay(arriving_bytes(upstream), exchange, response.write)
                    exchange.recorded = await self.recorder.record(exchange.record())
                    await response.write(end, last=True)
                else:
                    answer = noted(decoded(await upstream.read()), exchange)
                    exchange.recorded = await self.recorder.record(exchange.record())
                    await response.whole(msgspec.json.encode(answer), headers=headers)

    async def _record_interrupted(self, exchange: Exchange, reason: str) -> None:
        """Record an interrupted answer that has at least one token, as not trainable."""
        if exchange.token_ids:
            with contextlib.suppress(RequestError):  # the recorder logged it
                call = exchange.record(interrupted=reason)
                exchange.recorded = await self.recorder.record(call)
