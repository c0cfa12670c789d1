"""OpenTelemetry GenAI spans and the OpenInference dialect, from OTLP JSON."""

import json
from datetime import timedelta
from typing import Any

import pytest

from babylon.formats.otlp import Span
from babylon.formats.spans import Agents, Dialect, read_span_traces, reader_of
from babylon.formats.trace import ImportFileError, Trace
from tests.conftest import CAPTURED
from tests.unit.formats.spans import Traced
from tests.unit.formats.traces import NOON, document, message


def read(*exports: Any, dialect: Dialect | None = None) -> list[Trace]:
    return list(read_span_traces(map(document, exports), "imported", dialect))


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def chat(user: str, reply: str, **changes: Any) -> dict[str, Any]:
    """The attributes of a chat span; messages as a JSON string, as SDKs write them on spans."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o-mini",
        "gen_ai.response.model": "gpt-4o-mini-2024",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.input.messages": json.dumps([text("user", user)]),
        "gen_ai.output.messages": json.dumps(
            [{**text("assistant", reply), "finish_reason": "stop"}]
        ),
    } | changes


def llm(user: str, reply: str, **changes: Any) -> dict[str, Any]:
    """The attributes of an OpenInference LLM span."""
    return {
        "openinference.span.kind": "LLM",
        "llm.model_name": "gpt-4o",
        "llm.invocation_parameters": json.dumps({"temperature": 0.3, "max_tokens": 32}),
        "llm.input_messages.0.message.role": "system",
        "llm.input_messages.0.message.content": "Be brief.",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.contents.0.message_content.type": "text",
        "llm.input_messages.1.message.contents.0.message_content.text": user,
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": reply,
        "llm.token_count.prompt": 9,
        "llm.token_count.completion": 3,
    } | changes


def test_chat_spans_of_a_trace_are_a_trajectory_of_their_agent() -> None:
    traced = Traced()
    agent = traced.span("invoke_agent", {"gen_ai.operation.name": "invoke_agent",
                                         "gen_ai.agent.name": "clerk"})  # fmt: skip
    traced.span("chat", chat("second", "b"), second=5, parent=agent)
    traced.span("chat", chat("first", "a"), second=1, parent=agent)
    traced.span("execute_tool", {"gen_ai.operation.name": "execute_tool"}, parent=agent)
    (one,) = read(traced.export())
    assert (one.agent_id, one.start, one.end) == (
        "clerk", NOON + timedelta(seconds=1), NOON + timedelta(seconds=6)
    )  # fmt: skip
    first, second = (step.calls[0] for step in one.steps)
    assert first.messages == (message("system", "Be brief."), message("user", "first"))
    assert (first.response, second.response) == ("a", "b")
    assert (first.model, first.temperature, first.max_tokens) == ("gpt-4o-mini-2024", 0.0, 64)
    assert (first.latency_ms, first.prompt_tokens, first.completion_tokens) == (1000, 11, 2)


def test_a_conversation_of_several_traces_is_one_trajectory_of_the_service() -> None:
    traced = Traced()
    for second in (0, 1):
        traced.span(
            "chat", chat(str(second), "a", **{"gen_ai.conversation.id": "c-7"}), second=second
        )
    traced.span("chat", chat("alone", "a"), second=2)
    ours, other = read(traced.export())
    assert (ours.trajectory_id, ours.agent_id, len(ours.steps)) == ("c-7", "shop", 2)
    assert len(other.steps) == 1


def test_a_span_that_was_exported_twice_is_one_call() -> None:
    traced = Traced()
    first = traced.span("chat", chat("first", "a"))
    traced.span("chat", chat("second", "b"), second=1, parent=first)
    (one,) = read(traced.export(), traced.export())
    assert [step.calls[0].response for step in one.steps] == ["a", "b"]


def test_messages_on_the_span_s_event_and_structured_ones_are_read_too() -> None:
    whole = chat("u", "r")
    content = {key: whole.pop(key) for key in [*whole] if key.endswith("messages")}
    traced = Traced()
    traced.span("chat", whole, event=content)
    export = traced.export()
    (one,) = read(export)
    assert one.steps[0].calls[0].response == "r"
    (span,) = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    span["events"] = []
    span["attributes"] += [
        {"key": "gen_ai.input.messages", "value": structured([text("user", "u")])},
        {"key": "gen_ai.output.messages", "value": structured([text("assistant", "s")])},
    ]
    (one,) = read(export)
    assert one.steps[0].calls[0].response == "s"


def structured(value: Any) -> dict[str, Any]:
    """An OTLP ``AnyValue``."""
    if isinstance(value, dict):
        pairs = [{"key": key, "value": structured(item)} for key, item in value.items()]
        return {"kvlistValue": {"values": pairs}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [structured(item) for item in value]}}
    return {"stringValue": value}


def test_openinference_spans_are_told_by_their_kind() -> None:
    traced = Traced()
    chain = traced.span("chain", {"openinference.span.kind": "CHAIN", "agent.name": "clerk"})
    traced.span("llm", llm("hi", "hello", **{"session.id": "s-1"}), parent=chain)
    (one,) = read(traced.export())
    (step,) = one.steps
    assert (one.trajectory_id, one.agent_id) == ("s-1", "clerk")
    assert step.calls[0].messages == (message("system", "Be brief."), message("user", "hi"))
    assert (step.calls[0].temperature, step.calls[0].max_tokens) == (0.3, 32)
    assert (step.calls[0].prompt_tokens, step.calls[0].completion_tokens) == (9, 3)


def test_spans_of_both_dialects_must_be_told_apart_by_the_caller() -> None:
    traced = Traced()
    traced.span("both", chat("u", "gen_ai") | llm("u", "openinference"))
    export = traced.export()
    with pytest.raises(ImportFileError, match="otel and openinference: pass --format otel or"):
        read(export)
    for dialect, reply in (("otel", "gen_ai"), ("openinference", "openinference")):
        (one,) = read(export, dialect=dialect)  # type: ignore[arg-type]
        assert one.steps[0].calls[0].response == reply


WANTED = {"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"a":1}'}}
ANSWERED = {"role": "tool", "tool_call_id": "t1", "content": '{"files":3}'}


def test_tool_calls_and_their_results_become_openais() -> None:
    wants = {"type": "tool_call", "id": "t1", "name": "sh", "arguments": {"a": 1}}
    answers = {"type": "tool_call_response", "id": "t1", "response": {"files": 3}}
    thinks = {"type": "reasoning", "content": "hm"}
    prompt = [text("user", "count"), {"role": "assistant", "parts": [thinks, wants]},
              {"role": "tool", "parts": [answers]}]  # fmt: skip
    whole = chat("", "", **{"gen_ai.input.messages": json.dumps(prompt)})
    traced = Traced()
    traced.span("chat", whole | {"gen_ai.output.messages": json.dumps([prompt[1]])})
    (one,) = read(traced.export())
    (call,) = one.steps[0].calls
    assert call.prompt[1:] == (
        message("user", "count"),
        {"role": "assistant", "content": None, "tool_calls": [WANTED], "reasoning": "hm"},
        ANSWERED,
    )
    assert (call.response, call.tool_calls) == ("", (WANTED,))


def test_openinference_tool_calls_and_their_results_become_openais() -> None:
    prefix = "message.tool_calls.0.tool_call"
    wants = {f"{prefix}.id": "t1", f"{prefix}.function.name": "sh",
             f"{prefix}.function.arguments": '{"a":1}'}  # fmt: skip
    answer = {"message.role": "assistant", **wants}
    result = {"message.role": "tool", "message.tool_call_id": "t1"}
    attributes = llm("count", "") | {
        **{f"llm.input_messages.2.{name}": value for name, value in answer.items()},
        **{f"llm.input_messages.3.{name}": value for name, value in result.items()},
        "llm.input_messages.3.message.content": '{"files":3}',
        **{f"llm.output_messages.0.{name}": value for name, value in answer.items()},
    }
    traced = Traced()
    traced.span("llm", attributes)
    (one,) = read(traced.export())
    (call,) = one.steps[0].calls
    asked = {"role": "assistant", "content": None, "tool_calls": [WANTED]}
    assert call.prompt[2:] == (asked, ANSWERED)
    assert (call.response, call.tool_calls) == ("", (WANTED,))


IMAGE = {"role": "assistant", "parts": [{"type": "blob", "modality": "image", "content": "aGk="}]}
NAMELESS = {"role": "assistant", "parts": [{"type": "tool_call", "arguments": {}}]}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"gen_ai.operation.name": "embeddings"}, "hold calls of no known dialect"),
        ({"gen_ai.operation.name": "chat"}, "gen_ai.output.messages is missing: record content"),
        (chat("u", "r", **{"gen_ai.input.messages": "{"}), "gen_ai.input.messages is not JSON"),
        (chat("u", "r", **{"gen_ai.output.messages": json.dumps([IMAGE])}), "part of type 'blob'"),
        (chat("u", "r", **{"gen_ai.output.messages": json.dumps([NAMELESS])}), "names no function"),
        (chat("u", "r", **{"gen_ai.output.messages": json.dumps([text("assistant", "x")] * 2)}),
         "2 output messages"),
        (chat("u", "r", **{"gen_ai.request.temperature": "hot"}), "Expected `float`, got `str`"),
        (llm("u", "r", **{"llm.invocation_parameters": "[]"}), "is not a JSON object"),
        (llm("u", "r", **{"llm.output_messages.0.message.tool_calls.0.tool_call.id": "1"}),
         "llm.output_messages.0: a tool call names no function"),
        ({"openinference.span.kind": "LLM"}, "llm.output_messages is missing: record content"),
        ({"gen_ai.operation.name": "chat", f"gen_ai.prompt.{'1' * 5000}.content": "u"},
         "gen_ai.output.messages is missing"),
        (llm("u", "r", **{f"llm.output_messages.0.message.tool_calls.{'1' * 5000}.tool_call.id":
         "1", "llm.output_messages.0.message.content": ""}), "content None"),
    ],
)  # fmt: skip
def test_spans_that_cannot_be_read_are_named(attributes: dict[str, Any], message: str) -> None:
    traced = Traced()
    traced.span("x", attributes)
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        read(traced.export())


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ({"resourceSpans": {}}, "resourceSpans is not a list of objects"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"}]}]}]}, "traceId or spanId"),
        (
            {"resourceSpans": [{"scopeSpans": [{"spans": [
                {"traceId": "a", "spanId": "b", "startTimeUnixNano": "soon"}]}]}]},
            r"spans\[0\]: startTimeUnixNano: 'soon' is not an integer",
        ),
    ],
)  # fmt: skip
def test_what_is_no_otlp_is_named(export: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        read(export)


def test_a_log_record_that_cannot_be_read_costs_no_other_one() -> None:
    lines = (CAPTURED / "otel-1.36.jsonl").read_text().splitlines()
    documents = [document(json.loads(line)) for line in lines]
    failed: list[ImportFileError] = []  # a call that failed, in the file as it is
    whole = list(read_span_traces(documents, "imported", None, failed.append))
    told = [one.value for one in documents if "resourceLogs" in one.value]
    records: Any = told[0]["resourceLogs"]
    records[0]["scopeLogs"][0]["logRecords"].insert(0, {"body": {"stringValueStrindex": 7}})
    left: list[ImportFileError] = []
    assert list(read_span_traces(documents, "imported", None, left.append)) == whole
    assert left[1:] and len(left) == len(failed) + 1
    assert "logRecords[0]: attribute value of kind" in str(left[0])


def test_a_null_of_protobufs_json_is_an_empty_list() -> None:
    traced = Traced()
    traced.span("chat", chat("hi", "hello"))
    export = traced.export()
    (span,) = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    whole = read(export)
    span |= {"events": None, "links": None}
    assert read(export, {"resourceSpans": None}) == whole


def test_the_agent_of_each_span_in_a_deep_chain_is_found_with_one_look_around_it() -> None:
    looks: list[tuple[str, str]] = []

    class Counted(dict[tuple[str, str], Span]):
        def get(self, key: Any, default: Any = None) -> Any:
            looks.append(key)
            return super().get(key, default)

    def span(number: int, parent: int, **attributes: Any) -> Span:
        return Span(
            place="here",
            trace_id="a",
            span_id=str(number),
            parent_id=str(parent),
            name="x",
            start=NOON,
            end=NOON,
            attributes={"gen_ai.operation.name": "chat", **attributes},
            resource={"service.name": f"service {number}"},
        )

    chain = [span(number, number - 1) for number in range(500)]
    chain[100] = span(100, 99, **{"gen_ai.agent.name": "clerk"})
    chain.append(span(500, 501))
    chain.append(span(501, 500))  # inside each other
    reader = reader_of(chain[0])
    agents = Agents(Counted({(one.trace_id, one.span_id): one for one in chain}))
    assert reader
    found = [agents.agent_of(one, reader) for one in reversed(chain)]
    expected = [f"service {number}" for number in (501, 500)]
    expected += ["clerk"] * 400 + [f"service {number}" for number in range(99, -1, -1)]
    assert found == expected
    assert len(looks) == len(chain)
