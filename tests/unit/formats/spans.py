"""Spans as OpenTelemetry's own SDK makes and encodes them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, set_span_in_context

from tests.unit.formats.traces import NOON

SECOND_NS = 1_000_000_000


class Traced:
    """A traced program: ``span`` adds an operation of a second, ``export`` is OTLP JSON."""

    def __init__(self, begun_at: datetime = NOON) -> None:
        self._start_ns = int(begun_at.timestamp()) * SECOND_NS
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
        status: Status | None = None,
    ) -> Span:
        span = self.open(name, attributes, second=second, parent=parent)
        if event is not None:
            start = self._start_ns + second * SECOND_NS
            span.add_event("gen_ai.client.inference.operation.details", event, start)
        if status is not None:
            span.set_status(status)
        self.end(span, second + 1)
        return span

    def open(
        self,
        name: str,
        attributes: dict[str, Any],
        *,
        second: int = 0,
        parent: Span | None = None,
    ) -> Span:
        """Begin an operation; ``end`` ends it."""
        context = set_span_in_context(parent) if parent else None
        start = self._start_ns + second * SECOND_NS
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start)
        assert isinstance(span, Span)
        return span

    def end(self, span: Span, second: int = 60) -> None:
        span.end(self._start_ns + second * SECOND_NS)

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def export(self) -> dict[str, Any]:
        encoded: dict[str, Any] = MessageToDict(encode_spans(self.finished))
        return encoded
