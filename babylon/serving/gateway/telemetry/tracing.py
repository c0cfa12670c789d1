"""A span for each call, sent to an OTLP/HTTP collector by OpenTelemetry's SDK.

A span is made after the last byte of the answer and waits in a bounded queue, from which a thread
of the SDK sends it. If the collector is away, spans are dropped, and no call waits or fails.

Headers, certificate and timeout of the exporter, the sampler, the service's name and the sizes of
the queue are OpenTelemetry's own variables, which its SDK reads.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from babylon.core.settings import ServingSettings
from babylon.serving.gateway.asgi import Scope
from babylon.serving.gateway.exchange import Exchange
from babylon.serving.gateway.telemetry.call_span import attributes, content, operation

CLOSE_S = 2.0  # the longest wait for the last spans
SERVICE = "babylon-gateway"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CONTEXT = (b"traceparent", b"tracestate")
# Spans with content may have 192 KiB each, so fewer of them wait and go together.
_QUEUE_WITH_CONTENT, _BATCH_WITH_CONTENT = 512, 64


class CallTracer:
    """Sends a span of each call to the collector at ``endpoint``, its address without a path."""

    def __init__(self, endpoint: str, gateway_id: str, *, content: bool) -> None:
        self._content = content
        self._exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        resource = Resource.create({"service.instance.id": gateway_id})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_QUEUE_WITH_CONTENT if content else None,
                max_export_batch_size=_BATCH_WITH_CONTENT if content else None,
            )
        )
        self._tracer = self._provider.get_tracer("babylon.gateway")
        self._context = TraceContextTextMapPropagator()

    def called(self, exchange: Exchange, outcome: str, scope: Scope) -> None:
        """Make the span of a call that ended now; its parent is the client's ``traceparent``.

        Args:
            outcome: an HTTP status, or "left".
        """
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT
        }
        route = scope["raw_path"].decode("latin-1")  # the path is a chat's, whatever the dialect
        span = self._tracer.start_span(
            f"{operation(exchange)} {exchange.request.model}",
            self._context.extract(carrier),
            SpanKind.CLIENT,  # of the engine, which the conventions call the model's server
            attributes(exchange, outcome, route),
            start_time=_nanoseconds(exchange.started_at),
        )
        if self._content and exchange.recorded and span.is_recording():
            span.set_attributes(content(exchange.recorded))
        if outcome != "200":
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(datetime.now(UTC)))

    async def close(self) -> None:
        """Send the waiting spans if the collector takes them at once; drop them otherwise."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # and tries no more


def tracer_for(serving: ServingSettings, gateway_id: str) -> CallTracer | None:
    """Return the tracer that the settings ask for, ``None`` without a collector's address."""
    endpoint = serving.otlp_endpoint
    return CallTracer(endpoint, gateway_id, content=serving.otlp_content) if endpoint else None


def _nanoseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
