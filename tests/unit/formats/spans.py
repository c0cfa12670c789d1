"""Spans as OpenTelemetry's own SDK makes and encodes them."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context

from tests.unit.formats.traces import NOON

SECOND_NS = 1_000_000_000
START_NS = int(NOON.timestamp()) * SECOND_NS


class Traced:
    """A traced program: ``span`` adds an operation of a second, ``export`` is OTLP JSON."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(resource=Resource({"service.name": "shop"}))
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("shop")

    def span(
        self,
        name: str,
        attributes: dict[str, Any],
        *,
        second: int = 0,
        parent: Span | None = None,
        event: dict[str, Any] | None = None,
    ) -> Span:
        context = set_span_in_context(parent) if parent else None
        start = START_NS + second * SECOND_NS
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start)
        assert isinstance(span, Span)
        if event is not None:
            span.add_event("gen_ai.client.inference.operation.details", event, start)
        span.end(start + SECOND_NS)
        return span

    def export(self) -> dict[str, Any]:
        encoded: dict[str, Any] = MessageToDict(encode_spans(self._exporter.get_finished_spans()))
        return encoded
