"""Spans of the gateway's calls at a collector, which may be away."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from babylon.core.settings import Settings
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import Document
from babylon.serving.gateway.asgi import Receive, Response, Scope, Send, read_body
from babylon.serving.gateway.telemetry import tracing
from babylon.store import Store
from babylon.store.recording_rules import set_rule
from benchmarks.gateway.upstream import Upstream
from tests.calling_policy import save_calling_policy
from tests.integration.canned_gateway import canned_gateway
from tests.integration.test_serving import (
    HELLO,
    IDENTITY,
    Stack,
    on_uvicorn,
    register,
    running_stack,
    until_healthy,
)
from tests.integration.test_serving_poisoned import Poisoned
from tests.integration.test_tool_calls import PRICE

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP/HTTP collector; ``spans`` is what came, with the attributes of its program."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        assert scope["path"] == "/v1/traces"
        headers = dict(scope["headers"])
        packed = headers.get(b"content-encoding") == b"gzip"
        self.requests.append(
            ExportTraceServiceRequest.FromString(gzip.decompress(body) if packed else body)
        )
        await Response(send).whole(b"", content_type=b"application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        groups = [group for request in self.requests for group in request.resource_spans]
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]

    @property
    def sent(self) -> bytes:
        """All that came, as it came."""
        return b"".join(one.SerializeToString() for one in self.requests)


def attributes(owner: Any) -> dict[str, Any]:
    found = {}
    for pair in owner.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return found


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    one = Collector()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with on_uvicorn(one, listener):
            yield one, f"http://127.0.0.1:{listener.getsockname()[1]}"


def traced(settings: Settings, endpoint: str, **more: Any) -> Settings:
    return settings.replace(serving={"otlp_endpoint": endpoint, **more})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calling_policy(tmp_path_factory.mktemp("policy") / "v0")


async def test_each_call_is_a_span_in_the_clients_trace_without_its_content(
    store: Store, settings: Settings, checkpoint: Path
) -> None:
    await register(store, [checkpoint])
    context = {"traceparent": PARENT}
    async with collector() as (found, url), running_stack(store, traced(settings, url)) as stack:
        await until_healthy(stack.url)
        chat = await stack.chat(
            temperature=0.8, seed=4, stop=["###"], tools=[PRICE],
            extra_headers={**IDENTITY, **context},
        )  # fmt: skip
        stream = await stack.chat(stream=True, extra_headers=context, max_tokens=300)
        async for _ in stream.parse():
            pass
        asked: dict[str, Any] = {"model": "babylon", "extra_headers": context}
        await stack.client.responses.create(input="hello", max_output_tokens=16, **asked)
        await stack.client.completions.create(prompt="hello", max_tokens=16, **asked)
        async with AsyncAnthropic(base_url=stack.url, api_key=stack.client.api_key) as claude:
            await claude.messages.create(messages=HELLO, max_tokens=16, **asked)  # type: ignore[arg-type]
        rows = {row["call_id"]: row for row in await stack.rows()}
    spans = {attributes(span)["http.route"]: span for span in found.spans}
    assert len(found.spans) == 5 and len(rows) == 5
    assert {span.name for span in found.spans} == {"chat babylon", "text_completion babylon"}
    for span in found.spans:
        told = attributes(span)
        row = rows[told["gen_ai.response.id"]]
        assert span.trace_id.hex() == PARENT.split("-")[1]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        assert span.kind == Span.SPAN_KIND_CLIENT and span.status.code == 0
        assert told["gen_ai.usage.input_tokens"] == len(row["prompt_token_ids"])
        assert told["gen_ai.usage.output_tokens"] == len(row["completion_token_ids"])
        assert told["gen_ai.response.finish_reasons"] == [row["finish_reason"]]
        assert span.end_time_unix_nano > span.start_time_unix_nano
    told = attributes(spans["/v1/chat/completions"])
    assert told["gen_ai.request.stream"] and told["gen_ai.response.time_to_first_chunk"] > 0
    assert spans.keys() == {
        "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages"
    }  # fmt: skip
    (first,) = [
        attributes(span)
        for span in found.spans
        if attributes(span)["gen_ai.response.id"] == chat.headers["x-call-id"]
    ]
    assert first == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "babylon",
        "gen_ai.request.model": "babylon",
        "gen_ai.request.temperature": 0.8,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.seed": 4,
        "gen_ai.response.id": chat.headers["x-call-id"],
        "gen_ai.response.model": "babylon-v0",
        "gen_ai.response.finish_reasons": [chat.parse().choices[0].finish_reason],
        "gen_ai.usage.input_tokens": chat.parse().usage.prompt_tokens,
        "gen_ai.usage.output_tokens": chat.parse().usage.completion_tokens,
        "gen_ai.conversation.id": "trajectory-9",
        "gen_ai.agent.id": "agent-7",
        "http.route": "/v1/chat/completions",
        "babylon.policy.version": 0,
        "babylon.arm": "champion",
        "babylon.route.version": 1,
        "babylon.step": 3,
        "babylon.key": "local",
    }
    assert b"hello" not in found.sent and b"###" not in found.sent
    service = attributes(found.requests[0].resource_spans[0].resource)
    assert service["service.name"] == "babylon-gateway" and service["service.instance.id"] == "test"


async def test_content_is_asked_for_and_has_the_tool_calls_but_no_redacted_field(
    store: Store, settings: Settings, checkpoint: Path
) -> None:
    await register(store, [checkpoint])
    await set_rule(store, "agent", "alice", 1.0, ["card"])
    messages: list[Any] = [{"role": "user", "content": "Trade."}]
    async with collector() as (found, url):
        given = traced(settings, url, otlp_content=True)
        async with running_stack(store, given) as stack:
            await until_healthy(stack.url)
            while not (wanted := (await turn(stack, messages)).tool_calls):
                pass
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [wanted[0].model_dump()]},
                {"role": "tool", "tool_call_id": wanted[0].id, "content": "costs 1.5"},
            ]
            await turn(stack, messages)
            secret = [{"role": "user", "content": "hi", "card": "4929"}]
            await turn(stack, secret, user="alice")
            rows = await stack.rows()
    document = Document("spans", MessageToDict(_joined(found.requests)))
    steps = [step for trace in read_span_traces([document], "?") for step in trace.steps]
    calls = sorted((step.at, step.calls[0]) for step in steps if step.at)
    assert len(calls) == len(rows)
    for (_, call), row in zip(calls[:-1], rows[:-1], strict=True):
        assert list(call.prompt) == json.loads(row["messages"])
        assert call.response == row["response"]
        answered = json.loads(row["answer"] or "{}").get("tool_calls")
        assert call.tool_calls == (answered and tuple(answered))
    tools = [attributes(span).get("gen_ai.tool.definitions") for span in found.spans]
    assert json.loads(tools[0] or "")[0] == {"type": "function", **PRICE["function"]}
    assert b"4929" not in found.sent


async def turn(stack: Stack, messages: list[Any], **more: Any) -> Any:
    answer = await stack.chat(messages=messages, tools=[PRICE], max_tokens=64, **more)
    return answer.parse().choices[0].message


def _joined(requests: list[ExportTraceServiceRequest]) -> ExportTraceServiceRequest:
    joined = ExportTraceServiceRequest()
    for one in requests:
        joined.resource_spans.extend(one.resource_spans)
    return joined


async def test_a_failed_call_is_a_span_with_its_error(store: Store, settings: Settings) -> None:
    async with (
        collector() as (found, url),
        canned_gateway(store, traced(settings, url), Poisoned()) as gateway,
        gateway.client() as client,
    ):
        for user in ("500", "cut"):
            with pytest.raises(openai.APIError):
                await client.chat.completions.create(model="babylon", messages=HELLO, user=user)  # type: ignore[call-overload]
    assert {attributes(span)["error.type"] for span in found.spans} == {"500", "502"}
    assert all(span.status.code == 2 for span in found.spans)


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
async def test_a_dead_collector_costs_no_call_and_holds_up_no_stop(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        dead = traced(settings, f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with asyncio.timeout(25):  # an export that is waited for takes 30 s and more
            async with canned_gateway(store, dead, Upstream()) as gateway, gateway.client() as one:
                for _ in range(50):
                    await one.chat.completions.create(model="babylon", messages=HELLO)  # type: ignore[arg-type]
                assert len(await gateway.rows()) == 50
