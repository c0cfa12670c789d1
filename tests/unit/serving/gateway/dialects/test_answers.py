"""Chat answers as responses and messages, whole and streamed."""

from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from babylon.serving.gateway import asgi
from babylon.serving.gateway.dialects.messages import Messages
from babylon.serving.gateway.dialects.responses import Responses
from babylon.serving.gateway.dialects.translation import Dialects, Translation

ASKED = {"model": "babylon", "input": "hi", "max_tokens": 9, "instructions": "Trade.",
         "messages": [{"role": "user", "content": "hi"}]}  # fmt: skip
CALLS = [
    {"id": f"c{i}", "type": "function", "function": {"name": "price", "arguments": f'{{"t": {i}}}'}}
    for i in range(2)
]
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 2},
}
SCORE = {"token": "x", "bytes": [120], "logprob": -0.5, "top_logprobs": []}


def chat(finish: str = "tool_calls", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "call-1", "created": 7, "model": "babylon-v3", "choices": [choice],
            "usage": USAGE}  # fmt: skip


def chunks(answer: dict[str, Any], size: int = 3) -> list[dict[str, Any]]:
    """The answer as an engine streams it: text in pieces, a call's name first."""
    (choice,) = answer["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: text[i : i + size]} for i in range(0, len(text), size)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        deltas.append({"tool_calls": [{"index": index, "id": call["id"],
                                       "function": {"name": function["name"]}}]})  # fmt: skip
        said = function["arguments"]
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": said[i : i + size]}}]}
            for i in range(0, len(said), size)
        ]
    head = {name: answer[name] for name in ("id", "created", "model")}
    pieces = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    return [head | piece for piece in (*pieces, last, {"choices": [], "usage": answer["usage"]})]


def streamed(call: Translation, answer: dict[str, Any]) -> list[dict[str, Any]]:
    call.request({**ASKED, "stream": True})
    events = [event for chunk in chunks(answer) for event in call.chunk(chunk)]
    return [*events, *call.end()]


ANSWERS = {
    "text": chat("stop", content="Hello."),
    "cut": chat("length", content="Hello."),
    "nothing": chat("stop", content=""),
    "calls": chat(content=None, tool_calls=CALLS),
    "all": chat(reasoning_content="Hm, so.", content="I ask.", tool_calls=CALLS),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_streamed_response_ends_as_the_whole_one(name: str) -> None:
    whole = Responses()
    whole.request(ASKED)
    expected = whole.whole(ANSWERS[name])
    Response.model_validate(expected)
    events = streamed(Responses(), ANSWERS[name])
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["type"] == f"response.{'incomplete' if name == 'cut' else 'completed'}"
    assert events[-1]["response"] == expected
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == expected["output"]
    added: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            added[place] = added.get(place, "") + event["delta"]
    parts = {i: item.get("arguments") or item["content"][0]["text"] for i, item in enumerate(done)}
    assert added == {place: text for place, text in parts.items() if text}


def test_a_response_repeats_the_request_and_counts_tokens() -> None:
    call = Responses()
    call.request({**ASKED, "temperature": 0.5, "metadata": {"a": "b"}})
    response = Response.model_validate(call.whole(ANSWERS["all"]))
    assert (response.id, response.model, response.status) == ("call-1", "babylon-v3", "completed")
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        *["function_call"] * 2,
    ]
    assert (response.instructions, response.temperature) == ("Trade.", 0.5)
    assert response.metadata == {"a": "b"} and response.output_text == "I ask."
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (5, 4)
    cut = Responses().whole(ANSWERS["cut"])
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("include", [None, ["message.output_text.logprobs"]])
def test_logprobs_of_a_response_only_if_asked_for(include: Any) -> None:
    answer = chat("stop", content="x")
    answer["choices"][0]["logprobs"] = {"content": [SCORE]}
    call = Responses()
    call.request({**ASKED, "include": include})
    (item,) = call.whole(answer)["output"]
    assert item["content"][0]["logprobs"] == ([SCORE] if include else [])


def test_a_streamed_response_has_the_logprobs_of_tokens_without_text() -> None:
    scores = [{**SCORE, "logprob": -float(place)} for place in range(5)]
    texts = ["", "", "\N{GRINNING FACE}", "!", ""]  # one character of three tokens, and the end
    call = Responses()
    call.request({**ASKED, "stream": True, "include": ["message.output_text.logprobs"]})
    head = {"id": "call-1", "created": 7, "model": "babylon-v3"}
    events = [
        event
        for text, score in zip(texts, scores, strict=True)
        for event in call.chunk(
            {**head, "choices": [{"delta": {"content": text}, "logprobs": {"content": [score]}}]}
        )
    ]
    events += call.end()
    told = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert told == [scores[:3], scores[3:4], scores[4:]]
    (item,) = events[-1]["response"]["output"]
    (part,) = item["content"]
    assert (part["text"], part["logprobs"]) == ("".join(texts), scores)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_streamed_message_ends_as_the_whole_one(name: str) -> None:
    expected = Messages().whole(ANSWERS[name])
    Message.model_validate(expected)
    events = streamed(Messages(), ANSWERS[name])
    for event in events:
        TypeAdapter[Any](RawMessageStreamEvent).validate_python(event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert events[0]["message"] | {"usage": expected["usage"]} == expected | {
        "content": [],
        "stop_reason": None,
    }
    assert events[-2]["delta"]["stop_reason"] == expected["stop_reason"]
    assert events[-2]["usage"] == expected["usage"]
    kinds = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert kinds == [block["type"] for block in expected["content"]]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    signed = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
    thoughts = [one for one in expected["content"] if one["type"] == "thinking"]
    assert signed == [one["signature"] for one in thoughts]  # else clients forget the thought
    open_block = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        assert event["index"] == open_block
        if event["type"] == "content_block_stop":
            open_block = None


def test_a_message_names_why_it_ended() -> None:
    calls = Messages().whole(ANSWERS["calls"])
    assert (calls["stop_reason"], calls["content"][1]["input"]) == ("tool_use", {"t": 1})
    assert calls["usage"]["input_tokens"] == 3 and calls["usage"]["cache_read_input_tokens"] == 2
    demanded = chat("stop", tool_calls=ANSWERS["calls"]["choices"][0]["message"]["tool_calls"])
    assert Messages().whole(demanded)["stop_reason"] == "tool_use"
    assert streamed(Messages(), demanded)[-2]["delta"]["stop_reason"] == "tool_use"
    assert Messages().whole(ANSWERS["cut"])["stop_reason"] == "max_tokens"
    stopped = chat("stop", content="a")
    stopped["choices"][0]["stop_reason"] = "END"
    whole = Messages().whole(stopped)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    broken = [{"id": "c", "function": {"name": "price", "arguments": '{"t": '}}]
    (block,) = Messages().whole(chat(content=None, tool_calls=broken))["content"]
    assert block["input"] == {"arguments": '{"t": '}


@pytest.mark.parametrize("arguments", ["{'t': 1}", "[1]", '{"t": ', "", '{"t": 1}'])
def test_anthropics_client_reads_streamed_arguments_as_it_reads_whole_ones(arguments: str) -> None:
    """It fails on text that is no JSON, and the agent would lose the turn."""
    call = {"id": "c", "function": {"name": "price", "arguments": arguments}}
    answer = chat(content=None, tool_calls=[call])
    message, buffers = None, dict[int, bytes]()
    for event in streamed(Messages(), answer):
        parsed = TypeAdapter[Any](RawMessageStreamEvent).validate_python(event)
        message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    assert message is not None
    (block,) = Messages().whole(answer)["content"]
    assert message.content[0].model_dump()["input"] == block["input"]


@pytest.mark.parametrize("dialect", [Messages, Responses])
async def test_an_error_that_is_no_utf8_keeps_its_status(dialect: type[Translation]) -> None:
    sent: list[asgi.Message] = []

    async def app(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await asgi.Response(send).whole(b'{"error": {"message": "\xff"}}', status=429)

    async def receive() -> asgi.Message:
        return {"type": "http.disconnect"}

    async def send(message: asgi.Message) -> None:
        sent.append(message)

    await Dialects(app, dialect)({"method": "POST", "path": dialect.path}, receive, send)
    assert (sent[0]["status"], b"\xef\xbf\xbd" in sent[1]["body"]) == (429, True)


def test_arguments_that_are_too_deep_to_read_stay_text() -> None:
    deep = '{"a":' * 2000 + "1" + "}" * 2000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    (block,) = Messages().whole(chat(content=None, tool_calls=[call]))["content"]
    assert block["input"] == {"arguments": deep}
