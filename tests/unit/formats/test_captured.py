"""Traffic that other systems captured: files that their own libraries wrote (tests/data/captured).

The same conversation stands in all of them: a tool call, its result, a reply, and a call that
failed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from babylon.core.llm_calls import LlmCall
from babylon.formats.foreign_messages import messages_of, prompt_of
from babylon.formats.import_files import guess_format, read_traces
from babylon.formats.langfuse import read_langfuse
from babylon.formats.langsmith import read_langsmith
from babylon.formats.sharegpt import as_chat
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import ImportFileError, Trace
from tests.conftest import CAPTURED
from tests.unit.formats.spans import Traced
from tests.unit.formats.test_spans import chat, read, text
from tests.unit.formats.traces import document, tool_call, write_lines

QUOTE = tool_call("call_1", "quote", '{"ticker":"ACME"}')
PROMPT = [("system", "You trade."), ("user", "What now with ACME?")]


def of(name: str) -> tuple[list[Trace], list[str]]:
    """The traces of a file, and what was left out."""
    path, left = CAPTURED / name, list[ImportFileError]()
    traces = [*read_traces(path, guess_format(path), "imported", left.append)]
    return traces, [str(one).removeprefix(f"{path}") for one in left]


def said(call: LlmCall) -> list[tuple[object, object]]:
    return [(one["role"], one["content"]) for one in call.prompt]


SPAN = ":1: resourceSpans[0].scopeSpans[0].spans[2]: the call failed (status ERROR)"


@pytest.mark.parametrize(
    ("name", "agent", "model", "left"),
    [
        ("otel-1.36.jsonl", "desk", "gpt-4o-mini-2024-07-18", SPAN),
        ("openllmetry.jsonl", "desk", "gpt-4o-mini-2024-07-18", SPAN),
        ("openllmetry-0.40.jsonl", "desk", "gpt-4o-mini-2024-07-18", SPAN),
        ("openinference.jsonl", "desk", "gpt-4o-mini-2024-07-18", SPAN),
        ("langfuse.json", "trader", "gpt-4o-mini", ":1[3]: the call failed (level ERROR)"),
        ("langfuse-blob.jsonl", "trader", "gpt-4o-mini", ":4: the call failed (level ERROR)"),
        ("langsmith.jsonl", "trader", "gpt-4o-mini", ":4: the call failed (status error)"),
    ],
)
def test_a_captured_conversation_keeps_messages_tool_calls_and_usage(
    name: str, agent: str, model: str, left: str
) -> None:
    (trace, *_), named = of(name)
    assert (
        trace.agent_id == agent
        and trace.start
        and f"{trace.start:%Y-%m-%dT%H}" == ("2025-11-14T12")
    )
    ask, reply = (step.calls[0] for step in trace.steps)
    assert said(ask) == PROMPT and (ask.response, ask.tool_calls) == ("", (QUOTE,))
    assert said(reply) == [*PROMPT, ("assistant", None), ("tool", '{"price": 7}')]
    assert reply.prompt[2]["tool_calls"] == [QUOTE] and reply.prompt[3]["tool_call_id"] == "call_1"
    assert (reply.response, reply.tool_calls) == ("Hold: the price is 7.", None)
    assert (ask.model, ask.temperature, ask.max_tokens) == (model, 0.2, 64)
    assert (ask.prompt_tokens, ask.completion_tokens) == (21, 7)
    assert named == [left]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("langfuse.json", [0.25, 0.75]),  # the trace's 0.5 and true judge its last call
        ("langfuse-blob.jsonl", [0.25, 0.75]),
        ("langsmith.jsonl", [0.25, 0.75]),
    ],
)
def test_scores_and_feedback_become_rewards(name: str, rewards: list[float]) -> None:
    (trace, *_), _ = of(name)
    assert [step.reward for step in trace.steps] == rewards


def test_log_records_that_were_sent_twice_are_read_once(tmp_path: Path) -> None:
    spans, logs = (CAPTURED / "otel-1.36.jsonl").read_text().splitlines()
    twice = tmp_path / "twice.jsonl"
    twice.write_text("\n".join([spans, logs, logs]))
    trace, *_ = read_traces(twice, guess_format(twice), "imported", lambda _: None)
    ask, reply = (step.calls[0] for step in trace.steps)
    assert said(ask) == PROMPT and len(reply.prompt) == 4


def test_langchain_s_serialized_messages_are_read() -> None:
    (_, trace), _ = of("langsmith.jsonl")
    (step,) = trace.steps
    assert [role for role, _ in said(step.calls[0])] == ["system", "user", "assistant", "tool"]
    assert (step.calls[0].response, step.calls[0].tool_calls) == ("Hold.", (QUOTE,))


def test_sharegpt_turns_are_a_conversation_up_to_the_last_reply() -> None:
    (tools, plain), left = of("sharegpt.jsonl")
    ask, reply = (step.calls[0] for step in tools.steps)
    assert said(ask) == PROMPT and ask.tool_calls
    assert reply.prompt[3]["tool_call_id"] == ask.tool_calls[0]["id"]
    assert reply.response == "Hold: the price is 7."
    assert [step.calls[0].response for step in plain.steps] == ["hello"]
    assert [one.partition("]: ")[2][:34] for one in left] == ["a turn from 'human' with a NoneTyp"]


def test_reasoning_is_kept_beside_the_reply() -> None:
    parts = [{"type": "reasoning", "content": "7 is cheap."}, {"type": "text", "content": "Buy."}]
    traced = Traced()
    outputs = json.dumps([{"role": "assistant", "parts": parts, "finish_reason": "stop"}])
    traced.span("chat", chat("u", "r", **{"gen_ai.output.messages": outputs}))
    (trace,) = read(traced.export())
    call = trace.steps[0].calls[0]
    assert (call.response, call.reasoning) == ("Buy.", "7 is cheap.")


def test_messages_in_events_of_the_span_are_read() -> None:
    """As Azure's and Strands' instrumentations write the events of 1.36."""
    traced = Traced()
    span = chat("u", "r")
    for name in ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"):
        del span[name]
    traced.span("chat", span)
    export = traced.export()
    (one,) = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    one["events"] = [
        event("gen_ai.user.message", **{"gen_ai.event.content": '{"content": "hi"}'}),
        event("gen_ai.choice", message='[{"type": "text", "text": "hello"}]', index="0"),
    ]
    (trace,) = read(export)
    assert said(trace.steps[0].calls[0]) == [("user", "hi")]
    assert trace.steps[0].calls[0].response == "hello"


ORDER = '{"action": "post", "content": "hi", "message": "m"}'
SAID = [
    ORDER, '{"action":"hold"}', '["hold"]', '[{"buy": 1}]', "[1, 2]", "[" * 900 + "]" * 900, "[]",
    '[{"type": "buy", "ticker": "NVDA"}]', '{"action":"say","message":{"content":"hi"}}',
    '{"action":"search","input":{"q":"x"}}', '{"text":"hello"}', '{"output":[1,2]}',
    '{"type":"text","text":"q"}', '{"messages":["a"]}', '{"choices":["a","b"]}',
    '[{"role":"user","content":"z"}]', '{"parts":["a"],"plan":1}', '{"content":"hello"}',
]  # fmt: skip


@pytest.mark.parametrize("reply", SAID)
def test_a_reply_in_json_in_an_event_stays_a_text(reply: str) -> None:
    for choice in ({"message": reply}, {"message": json.dumps({"content": reply})}):
        if choice == {"message": '{"content":"hello"}'}:
            continue  # a message by the conventions
        traced = Traced()
        span = chat("u", "r")
        for name in ("input.messages", "output.messages", "system_instructions"):
            del span[f"gen_ai.{name}"]
        traced.span("chat", span)
        export = traced.export()
        (one,) = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
        one["events"] = [
            event("gen_ai.user.message", content='["hi"]'),
            event("gen_ai.choice", **choice),
        ]
        (trace,) = read(export)
        assert said(trace.steps[0].calls[0]) == [("user", '["hi"]')]
        assert trace.steps[0].calls[0].response == reply


@pytest.mark.parametrize("reply", SAID)
def test_a_reply_in_json_in_keys_with_dots_stays_a_text(reply: str) -> None:
    flat = {"prompt.0.role": "user", "prompt.0.content": "hi", "completion.0.content": reply}
    flat |= {"completion.0.role": "assistant", "operation.name": "chat"}
    traced = Traced()
    traced.span("chat", {f"gen_ai.{name}": value for name, value in flat.items()})
    (trace,) = read(traced.export())
    assert trace.steps[0].calls[0].response == reply


def event(name: str, **attributes: str) -> dict[str, Any]:
    pairs = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"name": name, "timeUnixNano": "1", "attributes": pairs}


def test_one_bad_span_costs_only_itself() -> None:
    traced, left = Traced(), list[ImportFileError]()
    traced.span("chat", chat("first", "a"))
    image = json.dumps([{"role": "user", "parts": [{"type": "uri", "uri": "https://x/y.png"}]}])
    traced.span("chat", chat("u", "b", **{"gen_ai.input.messages": image}), second=1)
    traced.span("chat", chat("u", "", **{"gen_ai.output.messages": "[]"}), second=2)
    export = traced.export()
    export["resourceSpans"][0]["scopeSpans"][0]["spans"].append({"name": "no ids"})
    traces = [*read_span_traces([document(export)], "imported", leave_out=left.append)]
    assert [step.calls[0].response for one in traces for step in one.steps] == ["a"]
    assert [str(one).partition("]: ")[2][:40] for one in left] == [
        "traceId or spanId is missing",
        "gen_ai.input.messages[0]: a part of type",
        "gen_ai.output.messages is missing: recor",
    ]


def test_a_byte_order_mark_and_a_broken_line_cost_no_file(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "u"},
                                    {"role": "assistant", "content": "r"}]})  # fmt: skip
    file, left = tmp_path / "chats.jsonl", list[ImportFileError]()
    for content, number in ((f"{{broken\n{line}\n", 1), (f"{line}\n{{broken\n{line}\n", 2)):
        file.write_bytes(b"\xef\xbb\xbf" + content.encode())
        left.clear()
        traces = [*read_traces(file, guess_format(file), "imported", left.append)]
        assert len(traces) == content.count("\n") - 1
        (bad,) = map(str, left)
        assert bad.startswith(f"{file}:{number}: not a JSON object")


def test_a_list_of_observations_and_a_page_of_the_api_are_the_same(tmp_path: Path) -> None:
    whole = json.loads((CAPTURED / "langfuse.json").read_text())
    rows = [*whole["observations"], *whole["scores"]]
    for name, value in (("list", rows), ("page", {"data": rows, "meta": {"cursor": None}})):
        file, left = write_lines(tmp_path / name, value), list[ImportFileError]()
        (trace,) = read_traces(file, guess_format(file), "imported", left.append)
        assert [step.reward for step in trace.steps] == [0.25, 0.75] and len(left) == 1


def generation(**changes: Any) -> dict[str, Any]:
    return {
        "id": "g", "traceId": "t", "type": "GENERATION", "startTime": "2025-11-14T12:00:00Z",
        "input": "hi", "output": "hello",
    } | changes  # fmt: skip


def test_a_score_counts_once_with_its_last_value() -> None:
    """An export that overlaps the one before it holds scores again, changed ones too."""
    scores = [
        {"id": score, "traceId": "t", "name": "good", "value": value}
        for score, value in (("s1", 0.0), ("s2", 0.5), ("s1", 1.0))
    ]
    own = {"id": "s3", "observationId": "g", "traceId": "t", "name": "good", "value": 0.0}
    rows = [generation(sessionId="t"), *scores, own]
    (trace,) = read_langfuse(map(document, rows), "imported")
    assert trace.steps[0].reward == 0.5


def test_a_score_of_an_agent_s_span_judges_its_trace_and_is_not_lost() -> None:
    agent = generation(id="a", type="AGENT", name="trader", startTime="2025-11-14T11:59:59Z")
    later = generation(id="h", parentObservationId="a", startTime="2025-11-14T12:00:01Z")
    score = {"id": "s", "observationId": "a", "traceId": "t", "name": "good", "value": 0.75}
    (trace,) = read_langfuse(map(document, [agent, generation(), later, score]), "imported")
    assert [step.reward for step in trace.steps] == [0.0, 0.75]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"startTime": "soon"}, "start_time 'soon' is not an ISO 8601 time"),
        ({"input": None}, "no input was recorded"),
        ({"output": None}, "no output was recorded"),
        ({"output": {"choices": [{"message": {"content": "a"}}] * 2}}, "2 output messages"),
        ({"input": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not"),
        ({"output": {"role": "tool", "content": "x"}}, "a message of role 'tool'"),
    ],
)
def test_generations_that_cannot_be_read_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        list(read_langfuse([document(generation(**changes))], "imported"))
    (trace,) = read_langfuse([document(generation())], "imported")
    assert said(trace.steps[0].calls[0]) == [("user", "hi")]


@pytest.mark.parametrize("reply", SAID)
def test_a_reply_and_a_prompt_in_json_stay_the_texts_that_they_are(reply: str) -> None:
    asked = '{"observation": 7}'
    run = {"run_type": "llm", "id": "r", "start_time": "2025-11-14T12:00:00"}
    traces = [
        *read_langfuse([document(generation(input=asked, output=reply))], "imported"),
        *read_langfuse([document(generation(output={"choices": [{"text": reply}]}))], "imported"),
    ]
    for outputs in ({"generations": [[{"text": reply}]]}, {"output": reply}):
        for given in (outputs, json.dumps(outputs)):  # a bulk export has texts
            one = run | {"inputs": {"prompts": [asked]}, "outputs": given}
            traces += read_langsmith([document(one)], "imported")
    for call in [trace.steps[0].calls[0] for trace in traces]:
        assert call.response == reply
        assert said(call) in ([("user", asked)], [("user", "hi")])


def test_an_output_that_is_an_object_of_the_agent_s_own_is_named() -> None:
    order = {"action": "post", "content": "hi"}
    with pytest.raises(ImportFileError, match="f:1: the output is an object with the keys action,"):
        list(read_langfuse([document(generation(output=order))], "imported"))


def test_nested_runs_and_json_texts_are_read() -> None:
    run = {"run_type": "llm", "id": "r", "trace_id": "t", "start_time": "2025-11-14T12:00:00",
           "inputs": json.dumps({"prompts": ["hi"]}), "parent_run_id": "c",
           "outputs": {"generations": [[{"text": "hello"}]]}}  # fmt: skip
    chain = {"run_type": "chain", "id": "c", "trace_id": "t", "name": "clerk", "child_runs": [run]}
    (trace,) = read_langsmith([document({"runs": [chain]})], "imported")
    assert (trace.trajectory_id, trace.agent_id) == ("t", "clerk")
    assert said(trace.steps[0].calls[0]) == [("user", "hi")]
    assert trace.steps[0].calls[0].response == "hello"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "conversations is not a non-empty list"),
        ([{"from": "narrator", "value": "x"}], "a turn from 'narrator' with a str"),
        ([{"from": "function_call", "value": "quote ACME"}], "a function call is not JSON"),
    ],
)
def test_turns_that_cannot_be_read_are_named(turns: list[Any], message: str) -> None:
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        as_chat(document({"conversations": turns}))


def test_several_tool_results_in_one_message_become_messages() -> None:
    results = [
        {"type": "tool_call_response", "id": i, "response": {"price": i}} for i in ("a", "b")
    ]
    inputs = json.dumps([text("user", "u"), {"role": "tool", "parts": results}])
    traced = Traced()
    traced.span("chat", chat("u", "r", **{"gen_ai.input.messages": inputs}))
    (trace,) = read(traced.export())
    prompt = trace.steps[0].calls[0].prompt[2:]
    assert [one["content"] for one in prompt] == ['{"price":"a"}', '{"price":"b"}']
    assert [one["tool_call_id"] for one in prompt] == ["a", "b"]


USE = {"type": "tool_use", "id": "call_1", "name": "quote", "input": {"ticker": "ACME"}}


def test_a_call_that_stands_in_the_content_and_beside_it_is_one_call() -> None:
    """As LangChain keeps a message of Anthropic."""
    own = [{"name": "quote", "args": {"ticker": "ACME"}, "id": "call_1", "type": "tool_call"}]
    other = {**USE, "id": "call_2"}
    parts = [{"type": "text", "text": "I look."}, USE, other]
    (message,) = messages_of("f", {"type": "ai", "content": parts, "tool_calls": own})
    assert message["tool_calls"] == [QUOTE, {**QUOTE, "id": "call_2"}]
    (message,) = messages_of("f", {"type": "ai", "content": parts[:2]})
    assert message["tool_calls"] == [QUOTE]


HI = {"role": "user", "content": "hi"}
KIND = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    "given",
    [
        {"instructions": "Be kind.", "input": [HI]},
        {"instructions": "Be kind.", "input": "hi"},
        {"system": "Be kind.", "messages": [HI]},
        {"system": [{"type": "text", "text": "Be kind."}], "messages": [HI]},
        {"system_instruction": {"parts": [{"type": "text", "text": "Be kind."}]}, "input": [HI]},
        {"system": "Be brief.", "messages": [{"role": "developer", "content": "Be kind."}, HI]},
    ],
)
def test_a_system_prompt_beside_the_messages_comes_first(given: dict[str, Any]) -> None:
    assert prompt_of("f", given) == [KIND, HI]


def test_a_system_prompt_that_is_no_text_is_named() -> None:
    with pytest.raises(ImportFileError, match="f: content 7 is not text"):
        prompt_of("f", {"system": 7, "messages": [HI]})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "text", "text": "7"}, {"type": "text", "text": " USD"}], "7 USD"),
        ([{"price": 7}], '[{"price":7}]'),
        ([], "[]"),
    ],
)
def test_text_blocks_of_a_tool_s_result_are_its_text(content: list[Any], told: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": told}
    assert messages_of("f", {"role": "user", "content": [result]}) == [answer]


def test_an_image_in_a_tool_s_result_is_no_text() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    result = {"type": "tool_result", "content": [{"type": "text", "text": "7"}, image]}
    with pytest.raises(ImportFileError, match="f: a part of type 'image' is not text"):
        messages_of("f", {"role": "user", "content": [result]})


def test_reasoning_in_langchain_s_further_fields_is_kept() -> None:
    further = {"reasoning_content": "7 is cheap."}
    (message,) = messages_of("f", {"type": "ai", "content": "Buy.", "additional_kwargs": further})
    assert message["reasoning"] == "7 is cheap."


def test_a_run_that_is_listed_and_inside_its_parent_is_one_call() -> None:
    run = {"run_type": "llm", "id": "r", "trace_id": "t", "start_time": "2025-11-14T12:00:00",
           "inputs": {"prompts": ["hi"]}, "parent_run_id": "c", "feedback_stats": {"a": {"avg": 1}},
           "outputs": {"generations": [[{"text": "hello"}]]}}  # fmt: skip
    chain = {"run_type": "chain", "id": "c", "trace_id": "t", "name": "clerk", "child_runs": [run]}
    (trace,) = read_langsmith(map(document, (chain, run)), "imported")
    (step,) = trace.steps
    assert (step.calls[0].response, step.reward) == ("hello", 1.0)
    nameless = {name: value for name, value in run.items() if name != "id"}
    (trace,) = read_langsmith([document({"runs": [nameless, nameless]})], "imported")
    assert len(trace.steps) == 2
