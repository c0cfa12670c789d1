"""Spans of agents, sent by OpenTelemetry's own exporter, become trajectories."""

import asyncio
import gzip
import json
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode

from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.play import size_limits
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.serving.gateway.telemetry import receiver
from babylon.store import Store
from babylon.store.api_keys import create_key
from tests.integration.test_play import (
    LAST_HOUR,
    Player,
    agent,
    checkpoint,
    other,
    player,
    validated,
)
from tests.integration.test_play import stack as stack
from tests.integration.test_serving import Stack
from tests.unit.formats.spans import Traced
from tests.unit.formats.test_spans import WANTED, chat

__all__ = ["agent", "checkpoint", "other", "stack"]
START = LAST_HOUR.start + timedelta(minutes=1)
AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "clerk"}
PROTOBUF = "application/x-protobuf"
MANY = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{}] * 10_001}]}]})


class TracedAgent(Traced):
    """A traced program that sends its spans to the gateway. Its spans are of the last hour."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        super().__init__(START)
        self._sends = exporter

    async def send(self, *spans: ReadableSpan) -> None:
        """Send these spans, or all."""
        batch = spans or self.finished
        result = await asyncio.to_thread(self._sends.export, batch)
        assert result is SpanExportResult.SUCCESS


def wants(name: str = "sh") -> str:
    part = {"type": "tool_call", "id": "t1", "name": name, "arguments": {"a": 1}}
    return json.dumps([{"role": "assistant", "parts": [part]}])


def ran(tool: str, **more: Any) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.arguments": '{"a": 1}',
        **more,
    }


async def finished(one: Player, trajectory: str) -> dict[str, Any]:
    """Wait until the trajectory is finished."""
    async with asyncio.timeout(20):
        while True:
            answer = await one.http.get(f"/v1/trajectories/{trajectory}")
            if answer.status_code == 200 and answer.json()["finished_at"]:
                state: dict[str, Any] = answer.json()
                return state
            await asyncio.sleep(0.05)


async def row_of(stack: Stack, trajectory: str) -> Any:
    row = await stack.store.game.fetchrow(
        'SELECT * FROM trajectories WHERE "trajectoryId" = $1', trajectory
    )
    assert row is not None
    return row


def traced_agent(stack: Stack, one: Player, **options: Any) -> TracedAgent:
    headers = {"authorization": f"Bearer {one.openai.api_key}"}
    return TracedAgent(OTLPSpanExporter(f"{stack.url}/v1/traces", headers=headers, **options))


async def test_a_key_whose_spans_wait_does_not_hold_up_other_keys(
    stack: Stack, agent: Player, other: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, waiting = asyncio.Event(), []
    add_spans = PlayHandler.add_spans

    async def slow(handler: PlayHandler, caller: Principal, *play: Any) -> int:
        if f"{caller.key_id}-" in agent.openai.api_key:
            waiting.append(caller.key_id)
            await over.wait()
        return await add_spans(handler, caller, *play)

    monkeypatch.setattr(PlayHandler, "add_spans", slow)
    sends = []
    for _ in range(receiver.AT_A_TIME):  # no more: they share the threads of the gateway
        traced = traced_agent(stack, agent)
        traced.span("chat", chat("count", "3"))
        sends.append(asyncio.create_task(traced.send()))
    async with asyncio.timeout(20):
        while len(waiting) < receiver.OF_A_KEY:
            await asyncio.sleep(0.01)
        traced = traced_agent(stack, other)
        traced.span("chat", chat("count", "3"))
        await traced.send()
    over.set()
    await asyncio.gather(*sends)


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_a_trace_of_an_agent_elsewhere_is_a_trajectory_that_is_not_trained_on(
    stack: Stack, agent: Player, compression: Compression
) -> None:
    traced = traced_agent(stack, agent, compression=compression)
    named = {**AGENT, "gen_ai.conversation.id": "named too late"}  # the first request decides
    root = traced.open("invoke_agent clerk", named)
    first = traced.span(
        "chat", chat("count", "", **{"gen_ai.output.messages": wants()}), second=1, parent=root
    )
    traced.span("GET", {"http.request.method": "GET"}, second=2, parent=root)
    traced.span("t", ran("sh", **{"gen_ai.tool.call.result": '{"n":3}'}), second=2, parent=root)
    failed = traced.span(
        "t", ran("rm"), second=3, parent=root, status=Status(StatusCode.ERROR, "no")
    )
    last = traced.span("chat", chat("count", "3"), second=4, parent=root)
    trajectory = f"{first.context.trace_id:032x}"
    await traced.send(last, failed)  # in any order, in several requests
    await traced.send()
    assert (await agent.http.get(f"/v1/trajectories/{trajectory}")).json()["finished_at"] is None
    traced.end(root)
    await traced.send(root)
    state = await finished(agent, trajectory)
    assert (state["agent_id"], state["window_id"]) == ("clerk", LAST_HOUR.id)
    row = await row_of(stack, trajectory)
    steps = json.loads(row["stepsJson"])
    assert [step["action"]["actionType"] for step in steps] == ["sh", "rm", "RESPONSE"]
    tool = steps[0]["action"]
    assert (tool["parameters"], tool["result"], tool["success"]) == ({"a": 1}, {"n": 3}, True)
    assert (steps[1]["action"]["success"], steps[1]["action"]["error"]) == (False, "no")
    (call,) = steps[0]["llmCalls"]
    assert call["toolCalls"] == [WANTED] and call["purpose"] == "evaluation"
    assert steps[2]["llmCalls"][0]["response"] == "3"
    await traced.send()  # the answer was lost: everything is sent again
    assert await row_of(stack, trajectory) == row


async def test_calls_through_the_gateway_are_trained_with_their_tokens_and_the_spans_tools(
    stack: Stack, agent: Player, settings: Settings, store: Store
) -> None:
    for number in range(3):
        traced, name = traced_agent(stack, agent), f"conversation-{number}"
        headers = {"x-babylon-agent": f"agent-{number}"}
        root = traced.open("run", {**AGENT, "gen_ai.conversation.id": name})
        for step in range(5):
            answer = await agent.chat(headers=headers, seed=10 * number + step)
            about = {"gen_ai.operation.name": "chat", "gen_ai.response.id": answer.parse().id}
            traced.span("chat", about, second=2 * step, parent=root)
            traced.span("t", ran(f"tool-{step}"), second=2 * step + 1, parent=root)
        traced.end(root)
        await traced.send()
        late = {"type": "finish", "trajectory_id": name, "reward": float(number)}
        (result,) = await agent.ok(late)
        assert result["calls"] == 5
        steps = json.loads((await row_of(stack, name))["stepsJson"])
        assert [one["action"]["actionType"] for one in steps] == [f"tool-{n}" for n in range(5)]
        assert [len(one["llmCalls"]) for one in steps] == [1] * 5
        assert (await row_of(stack, name))["agentId"] == f"agent-{number}"
    rows = await stack.rows()
    assert {row["trajectory_id"] for row in rows} == {f"conversation-{n}" for n in range(3)}
    _, artifact = await validated(store, settings, LAST_HOUR)
    trajectories = read_trajectories(settings.home, artifact)
    calls = [call for one in trajectories for call in one.calls]
    assert len(calls) == 15 and not any(call.retokenized for call in calls)


async def test_bad_spans_are_rejected_by_number_and_cost_no_other(
    stack: Stack, agent: Player, other: Player
) -> None:
    await other.ok({"type": "start", "trajectory_id": "theirs"})
    traced = Traced(START)
    good = traced.span("chat", chat("a", "b"))
    for attributes in (
        {"gen_ai.operation.name": "chat"},
        chat("a", "b", **{"gen_ai.conversation.id": "theirs"}),
        chat("a", "b", **{"gen_ai.conversation.id": "x" * 201}),
        ran("x" * 101),
    ):
        traced.span("bad", attributes)
    encoded = otlp_json(traced)
    encoded["resourceSpans"][0]["scopeSpans"][0]["spans"].append({"traceId": "x", "spanId": "y"})
    answer = await agent.http.post("/v1/traces", json=encoded)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    told = answer.json()["partialSuccess"]
    assert told["rejectedSpans"] == "5" and "at most 200" in told["errorMessage"]
    await finished(agent, f"{good.context.trace_id:032x}")
    again = await agent.http.post("/v1/traces", json=otlp_json(traced))
    assert again.json()["partialSuccess"]["rejectedSpans"] == "4"
    late = traced.span("chat", chat("later", "c"), parent=good)
    protobuf = await agent.http.post(
        "/v1/traces",
        content=encode_spans([late]).SerializeToString(),
        headers={"content-type": PROTOBUF},
    )
    told = ExportTraceServiceResponse.FromString(protobuf.content).partial_success
    assert told.rejected_spans == 1 and "is finished: begin another" in told.error_message


async def test_agents_with_keys_of_their_own_share_a_trace_and_keep_their_trajectories(
    stack: Stack, agent: Player, other: Player
) -> None:
    """An agent hands its trace to those that it calls. The first one to send took the others'."""
    called, caller = Traced(START), Traced(START)
    called.span("chat", chat("a", "b", **{"gen_ai.conversation.id": "called"}))
    caller.span("chat", chat("c", "d", **{"gen_ai.conversation.id": "caller"}))
    sent = [otlp_json(called), otlp_json(caller)]
    spans = [one["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for one in sent]
    spans[1]["traceId"] = spans[0]["traceId"]
    for one, body in ((other, sent[0]), (agent, sent[1]), (agent, sent[1])):
        answer = await one.http.post("/v1/traces", json=body)
        assert answer.status_code == 200 and "partialSuccess" not in answer.json()
    places = await stack.store.pool.fetch("SELECT trajectory_id FROM babylon.play_spans ORDER BY 1")
    assert [row[0] for row in places] == ["called", "caller"]


async def test_spans_that_exceed_the_size_of_a_trajectory_are_rejected(
    stack: Stack, agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "MAX_STORED_BYTES", 3000)
    about = {"gen_ai.conversation.id": "long"}
    first, second = Traced(START), Traced(START)
    first.span("chat", chat("a", "b", **about))
    second.span("chat", chat("a" * 2000, "b", **about))
    for traced, rejected in ((first, None), (second, "1"), (first, None)):
        answer = await agent.http.post("/v1/traces", json=otlp_json(traced))
        told = answer.json().get("partialSuccess", {})
        assert told.get("rejectedSpans") == rejected
        assert rejected is None or "of at most 3000" in told["errorMessage"]


def otlp_json(traced: Traced) -> dict[str, Any]:
    """OTLP JSON with hexadecimal ids, as exporters write it; ``MessageToDict`` writes base64."""
    encoded = MessageToDict(encode_spans(traced.finished))
    spans = [s for g in encoded["resourceSpans"] for one in g["scopeSpans"] for s in one["spans"]]
    for span, made in zip(spans, traced.finished, strict=True):
        assert made.context
        span["traceId"] = f"{made.context.trace_id:032x}"
        span["spanId"] = f"{made.context.span_id:016x}"
    return encoded


async def test_a_key_of_one_agent_sends_spans_for_that_agent_only(
    stack: Stack, agent: Player
) -> None:
    key = str(await create_key(stack.store, "a", scopes=["record"], agents=["alice"]))
    crowd = str(await create_key(stack.store, "c", scopes=["record"], agents=["crowd-*"]))
    for secret, owner in ((key, "alice"), (crowd, None)):
        async with player(stack, secret) as one, asyncio.timeout(20):
            while (await one.http.get("/v1/trajectories/x")).status_code == 401:
                await asyncio.sleep(0.05)
            traced = Traced(START)
            span = traced.span("chat", chat("a", "b", **{"gen_ai.agent.name": "Assistant"}))
            answer = await one.http.post("/v1/traces", json=otlp_json(traced))
            if owner:
                state = await finished(one, f"{span.context.trace_id:032x}")
                assert state["agent_id"] == owner
            else:
                assert "is for crowd-*" in answer.json()["partialSuccess"]["errorMessage"]


async def test_a_conversation_ends_after_a_rest_unless_its_steps_are_events(
    stack: Stack, agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REST_S", 0.0)
    # as docs/play.md says
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", stack.url)
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{agent.openai.api_key}"
    )
    traced = TracedAgent(OTLPSpanExporter())
    start = {"type": "start", "trajectory_id": "events", "at": START.isoformat()}
    step = {"type": "step", "trajectory_id": "events", "number": 0, "at": START.isoformat()}
    await agent.ok(start, step)
    for second, name in enumerate(("events", "c-1", "c-1")):
        named = {"gen_ai.conversation.id": name}
        traced.span("chat", chat("a", "b", **named), second=second)
    await traced.send()
    await finished(agent, "c-1")
    state = (await agent.http.get("/v1/trajectories/events")).json()
    assert (state["next_step"], state["finished_at"]) == (1, None)
    assert len(json.loads((await row_of(stack, "c-1"))["stepsJson"])) == 2


async def test_spans_that_make_no_trajectory_are_dropped_and_hold_up_no_other(
    stack: Stack, agent: Player
) -> None:
    traced = traced_agent(stack, agent)
    empty = traced.span("invoke_agent", AGENT)
    answer = await agent.chat("told otherwise")
    double = traced.span("chat", chat("a", "b", **{"gen_ai.response.id": answer.parse().id}))
    good = traced.span("chat", chat("a", "b"), second=1)
    await traced.send()
    await finished(agent, f"{good.context.trace_id:032x}")
    async with asyncio.timeout(20):
        while await stack.store.pool.fetchval("SELECT count(span) FROM babylon.play_spans"):
            await asyncio.sleep(0.05)
    for span in (empty, double):
        state = (await agent.http.get(f"/v1/trajectories/{span.context.trace_id:032x}")).json()
        assert state["finished_at"] is None


async def test_the_tools_of_calls_that_name_a_trajectory_are_kept_if_the_trace_names_it_too(
    stack: Stack, agent: Player
) -> None:
    traced = traced_agent(stack, agent)
    answer = await agent.chat("told")
    about = {"gen_ai.operation.name": "chat", "gen_ai.response.id": answer.parse().id}
    root = traced.open("run", {**AGENT, "gen_ai.conversation.id": "told"})
    traced.span("chat", about, parent=root)
    traced.span("t", ran("sh"), second=1, parent=root)
    traced.end(root)
    await traced.send()
    (result,) = await agent.ok({"type": "finish", "trajectory_id": "told"})
    assert result["calls"] == 1
    (step,) = json.loads((await row_of(stack, "told"))["stepsJson"])
    assert step["action"]["actionType"] == "sh"


async def test_a_finish_that_waits_holds_up_no_other(stack: Stack, agent: Player) -> None:
    store, waiting = stack.store, traced_agent(stack, agent)
    waiting.span("chat", chat("a", "b", **{"gen_ai.conversation.id": "waits"}))
    await waiting.send()
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.fetch("SELECT FROM babylon.plays WHERE trajectory_id = 'waits' FOR UPDATE")
        await store.pool.execute("UPDATE babylon.play_spans SET root = true")
        for _ in range(2):  # the second comes after a look at which the first one waited
            other = traced_agent(stack, agent)
            span = other.span("chat", chat("a", "b"))
            await other.send()
            await finished(agent, f"{span.context.trace_id:032x}")
    await finished(agent, "waits")


REFUSED: list[tuple[int, dict[str, str], bytes, str]] = [
        (400, {"content-type": PROTOBUF}, b"\xff\xff", "no ExportTraceServiceRequest"),
        (400, {}, b"{", "no ExportTraceServiceRequest"),
        (400, {}, b'{"resourceSpans": 3}', "resourceSpans is not a list"),
        (400, {"content-encoding": "gzip"}, b"{}", "not gzip"),
        (400, {"content-encoding": "gzip"}, gzip.compress(b"{}")[:-9], "ends early"),
        (400, {"content-encoding": "gzip"}, 2 * gzip.compress(b"{}"), "send one gzip"),
        (413, {"content-encoding": "gzip"}, gzip.compress(bytes(2**25)), "unpacks to over"),
        (413, {}, MANY.encode(), "10001 spans"),
        (415, {"content-encoding": "br"}, b"{}", "send gzip"),
        (415, {"content-type": "text/plain"}, b"{}", "send application/x-protobuf"),
        (401, {"authorization": "Bearer no"}, b"{}", "no valid API key"),
        (200, {}, b"{}", ""),
        (200, {"content-type": "application/json; charset=utf-8"}, b'{"resourceSpans":[]}', ""),
]  # fmt: skip


async def test_what_is_no_otlp_is_refused_as_otlp_says(stack: Stack, agent: Player) -> None:
    for status, headers, body, message in REFUSED:
        given = {"content-type": "application/json", **headers}
        answer = await agent.http.post("/v1/traces", content=body, headers=given)
        assert answer.status_code == status, (headers, body[:50])
        assert message in answer.text if status != 200 else answer.json() == {}
