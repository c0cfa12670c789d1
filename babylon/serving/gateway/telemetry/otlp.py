"""Traces over OTLP/HTTP: the body of a request, and the answers.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import zlib
from typing import Literal

import msgspec
from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from babylon.core.llm_calls import JsonObject
from babylon.formats.otlp import RawSpan, raw_spans
from babylon.formats.trace import Document, ImportFileError
from babylon.serving.gateway.asgi import Headers
from babylon.serving.openai_wire import MAX_BODY_BYTES, RequestError, decode_batch

Encoding = Literal["application/x-protobuf", "application/json"]
PROTOBUF: Encoding = "application/x-protobuf"
JSON: Encoding = "application/json"
MAX_UNPACKED_BYTES = 4 * MAX_BODY_BYTES
MAX_SPANS = 10_000  # a collector sends up to 8,192 together
# The attributes that make a span one of a model, an agent or a tool: the conventions', older
# OpenLLMetry's and OpenInference's.
KINDS = ("gen_ai.operation.name", "llm.request.type", "openinference.span.kind")
_IDS = ("traceId", "spanId", "parentSpanId")
_PLACE = "the body"
_UNREADABLE = (
    DecodeError,
    ImportFileError,
    RecursionError,
    UnicodeDecodeError,
    msgspec.MsgspecError,
)


def encoding_of(headers: Headers) -> Encoding:
    """Return the encoding of a request.

    Raises:
        RequestError: 415, it is none of OTLP's.
    """
    sent = _header(headers, b"content-type").partition(";")[0].strip()
    if sent == PROTOBUF:
        return PROTOBUF
    if sent == JSON:
        return JSON
    raise RequestError(415, f"content type {sent!r:.80}: send {PROTOBUF} or {JSON}")


def unpacked(headers: Headers, body: bytes) -> bytes:
    """Return the body, decompressed if it is gzip.

    Raises:
        RequestError: 400, it is no gzip; 413, too large; 415, another compression.
    """
    match _header(headers, b"content-encoding"):
        case "" | "identity":
            return body
        case "gzip":
            pass
        case other:
            raise RequestError(415, f"content encoding {other!r:.80}: send gzip, or none")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(body, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise RequestError(400, f"the body is not gzip: {error}") from error
    if unpacker.unconsumed_tail:
        raise RequestError(413, f"the body unpacks to over {MAX_UNPACKED_BYTES} bytes: send less")
    if not unpacker.eof:
        raise RequestError(400, "the body is not gzip: it ends early")
    if unpacker.unused_data:
        raise RequestError(400, "the body goes on after its gzip: send one gzip in a request")
    return found


def told_spans(encoding: Encoding, body: bytes) -> list[RawSpan]:
    """Return the spans that tell of a model, an agent or a tool, and the roots of traces.

    Raises:
        RequestError: 400, the body is no ``ExportTraceServiceRequest``; 413, too many spans.
    """
    try:
        if encoding == PROTOBUF:
            value = _as_json(ExportTraceServiceRequest.FromString(body))
        else:
            value = msgspec.convert(decode_batch(body), JsonObject)
        spans = list(raw_spans(Document(_PLACE, value)))
    except _UNREADABLE as error:
        raise RequestError(400, f"the body is no ExportTraceServiceRequest: {error}") from error
    _check_number(len(spans))
    told = [span for span in spans if _tells(span.value)]
    for span in told:
        for name in _IDS:
            if isinstance(known := span.value.get(name), str):
                span.value[name] = known.lower()  # the specification allows both cases
    return told


def _as_json(request: ExportTraceServiceRequest) -> JsonObject:
    """Return a request as OTLP JSON, with the used spans only: to convert one is slow."""
    _check_number(sum(len(s.spans) for group in request.resource_spans for s in group.scope_spans))
    return {
        "resourceSpans": [
            {
                "resource": MessageToDict(group.resource),
                "scopeSpans": [
                    {"spans": [_span_as_json(span) for span in scope.spans if _is_used(span)]}
                    for scope in group.scope_spans
                ],
            }
            for group in request.resource_spans
        ]
    }


def _is_used(span: Span) -> bool:
    return not span.parent_span_id or any(one.key in KINDS for one in span.attributes)


def _span_as_json(span: Span) -> JsonObject:
    """Return a span with its ids in hexadecimal, as OTLP JSON has them, and not in base64."""
    ids = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_span_id.hex(),
    }
    return {**MessageToDict(span), **ids}


def _tells(span: JsonObject) -> bool:
    attributes = span.get("attributes")
    listed = attributes if isinstance(attributes, list) else []
    keys = [one.get("key") for one in listed if isinstance(one, dict)]
    return not span.get("parentSpanId") or any(key in keys for key in KINDS)


def _check_number(spans: int) -> None:
    if spans > MAX_SPANS:
        raise RequestError(413, f"{spans} spans in a request: send at most {MAX_SPANS}")


def accepted(encoding: Encoding, rejected: int, why: str) -> bytes:
    """Return the body of the answer 200; ``rejected`` spans are not stored."""
    answer = ExportTraceServiceResponse()
    if rejected:
        told = ExportTracePartialSuccess(rejected_spans=rejected, error_message=why)
        answer.partial_success.CopyFrom(told)
    return _encoded(encoding, answer)


def refused(encoding: Encoding, error: RequestError) -> bytes:
    """Return the body of an error."""
    return _encoded(encoding, Status(message=str(error)))


def _encoded(encoding: Encoding, message: Message) -> bytes:
    json = encoding == JSON
    body: bytes = (
        MessageToJson(message, indent=None).encode() if json else message.SerializeToString()
    )
    return body


def _header(headers: Headers, wanted: bytes) -> str:
    return next((value.decode("latin-1").lower() for name, value in headers if name == wanted), "")
