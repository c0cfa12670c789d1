"""The gateway's wire format: every field reaches the engine, every answer the client."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from babylon.core.settings import Settings
from babylon.store import Store
from benchmarks.gateway.upstream import TOKENS, Upstream, events
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway

TOOLS = [{"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}}]
TOOL_CALL = {
    "index": 0,
    "id": "call-1",
    "type": "function",
    "function": {"name": "buy", "arguments": '{"x":1}'},
}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "babylon-v0",
    "choices": [
        {
            "index": 0,
            "text": " Paris.",
            "logprobs": {"tokens": [" Paris", "."], "token_logprobs": [-0.25, -0.5]},
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "prompt_token_ids": [1, 2],
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
}


class Scripted(Upstream):
    """Remembers what it is asked, and answers with ``reply`` (or as ``Upstream`` does)."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.reply: dict[str, Any] | None = None
        self.status = 200
        self.dialect: Callable[[list[bytes]], bytes] | None = None

    async def _answer(self, body: bytes, send: Any) -> None:
        self.asked.append(json.loads(body))
        if self.dialect is not None:
            payloads = [event.removeprefix(b"data: ").rstrip() for event in events(exact=True)]
            await self._send_by_byte(self.dialect(payloads), send)
            return
        if self.reply is None:
            await super()._answer(body, send)
            return
        data = json.dumps(self.reply).encode()
        if self.asked[-1].get("stream"):
            data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _send_by_byte(self, body: bytes, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for byte in body:
            message = {"type": "http.response.body", "body": bytes([byte]), "more_body": True}
            await send(message)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _stream(
    *, end: bytes = b"\n", head: bytes = b"", before: bytes = b"data: ", between: bytes = b""
) -> Callable[[list[bytes]], bytes]:
    """An upstream's dialect: ``before`` each payload, ``between`` events, ``end`` of lines."""

    def encode(payloads: list[bytes]) -> bytes:
        body = b"".join(between + before + payload + b"\n\n" for payload in payloads)
        return head + body.replace(b"\n", end)

    return encode


def _on_several_lines(payloads: list[bytes]) -> bytes:
    """JSON may break a line wherever it has a space; each line is a data field of its own."""
    *chunks, done = payloads
    split = [b"data: " + chunk.replace(b", ", b",\ndata: ") + b"\n\n" for chunk in chunks]
    return b"".join(split) + b"data: " + done + b"\n\n"


DIALECTS = {
    "comments": _stream(between=b": ping\n\n"),
    "no space": _stream(before=b"data:"),
    "fields": _stream(before=b"event: message\nid: 1\nretry: 10\ntrace: x\ndata: "),
    "several lines": _on_several_lines,
    "CR LF": _stream(end=b"\r\n", between=b": ping\n\n"),
    "CR": _stream(end=b"\r"),
    "byte order mark": _stream(head=b"\xef\xbb\xbf"),
    "heartbeats": _stream(between=b"data\n\n"),
}


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
async def gateway(store: Store, settings: Settings, engine: Scripted) -> AsyncIterator[Canned]:
    async with canned_gateway(store, settings, engine) as gateway:
        yield gateway


async def test_tools_and_json_mode_reach_the_engine(gateway: Canned, engine: Scripted) -> None:
    sent: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    async with gateway.client() as client:
        await client.chat.completions.create(model="babylon", messages=HELLO, **sent)
    (asked,) = engine.asked
    sent |= sent.pop("extra_body")
    assert {name: asked[name] for name in sent} == sent
    (row,) = await gateway.rows()
    assert json.loads(row["parameters"]) == sent
    assert row["untrainable_reason"] == "the sampling distribution was changed by response_format"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_without_constraint_is_trainable(
    gateway: Canned, engine: Scripted, stream: bool
) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    choice = {
        "index": 0,
        ("delta" if stream else "message"): said,
        "token_ids": [5],
        "logprobs": {"content": [{"token": "x", "bytes": [], "logprob": -1.0, "top_logprobs": []}]},
        "finish_reason": "tool_calls",
    }
    engine.reply = {
        "id": "1",
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": 1,
        "model": "babylon-v0",
        "choices": [choice],
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }
    async with gateway.client() as client:
        answer = await client.chat.completions.create(
            model="babylon", messages=HELLO, tools=TOOLS, stream=stream
        )
        first = (await anext(answer) if stream else answer).choices[0]
        heard = first.delta if stream else first.message
    assert heard.tool_calls[0].function.arguments == '{"x":1}'
    (row,) = await gateway.rows()
    assert (row["trainable"], row["finish_reason"]) == (True, "tool_calls")


@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_completions_recorded(
    gateway: Canned, engine: Scripted, logprobs: int | None
) -> None:
    engine.reply = COMPLETION
    async with gateway.client() as client:
        answer = await client.completions.with_raw_response.create(
            model="babylon", prompt="The capital is", max_tokens=5, logprobs=logprobs
        )
    choice = answer.parse().choices[0]
    assert choice.text == " Paris."
    assert (choice.logprobs is None) == (logprobs is None)
    assert "token_ids" not in choice.model_extra and "prompt_token_ids" not in choice.model_extra
    assert engine.asked[0]["logprobs"] == (logprobs or 0)
    (row,) = await gateway.rows()
    assert row["call_id"] == answer.headers["x-call-id"]
    assert json.loads(row["messages"]) == {"prompt": "The capital is"}
    assert (row["prompt_token_ids"], row["completion_token_ids"]) == ([1, 2], [7, 8])
    assert (row["logprobs"], row["response"], row["trainable"]) == ([-0.25, -0.5], " Paris.", True)


async def test_one_prompt_of_tokens_is_accepted(gateway: Canned, engine: Scripted) -> None:
    engine.reply = COMPLETION
    async with gateway.client() as client:
        await client.completions.create(model="babylon", prompt=[1, 2])
        for prompt in ([], ["a", 1], [[]]):
            with pytest.raises(openai.BadRequestError, match="prompt"):
                await client.completions.create(model="babylon", prompt=prompt)
        with pytest.raises(openai.BadRequestError, match="echo and best_of"):
            await client.completions.create(model="babylon", prompt="a", echo=True)
    assert len(engine.asked) == 1


async def test_an_engines_refusal_is_sent_on_and_no_call(gateway: Canned, engine: Scripted) -> None:
    engine.status, engine.reply = 400, {"error": {"message": "no such tool", "type": "x"}}
    async with gateway.client() as client:
        with pytest.raises(openai.BadRequestError, match="no such tool"):
            await client.chat.completions.create(model="babylon", messages=HELLO)
        # An engine that refuses the gateway's secret says nothing about the client's key.
        engine.status, engine.reply = 401, {"error": "Unauthorized"}
        with pytest.raises(openai.InternalServerError, match="refuses the gateway") as refused:
            await client.chat.completions.create(model="babylon", messages=HELLO)
        assert refused.value.status_code == 503
    assert await gateway.rows() == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_stream_dialects_are_read(gateway: Canned, engine: Scripted, dialect: str) -> None:
    engine.dialect = DIALECTS[dialect]
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model="babylon", messages=HELLO, stream=True)
        chunks = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    text = "".join(f" word{number}" for number in range(TOKENS))
    assert "".join(filter(None, chunks)) == text
    (row,) = await gateway.rows()
    assert (row["response"], row["trainable"], row["finish_reason"]) == (text, True, "stop")
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.url}/health/ready") as health,
    ):
        assert health.status == 200


async def test_metrics_count_calls_by_arm_and_version(gateway: Canned) -> None:
    async with gateway.client() as client:
        await client.chat.completions.create(model="babylon", messages=HELLO)
        stream = await client.chat.completions.create(
            model="babylon-v0", messages=HELLO, stream=True
        )
        async for _ in stream:
            pass
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=HELLO)
    await gateway.rows()
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{gateway.url}/metrics") as response,
    ):
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    for line in (
        'babylon_calls_total{arm="champion",outcome="200",version="0"} 1.0',
        'babylon_calls_total{arm="pinned",outcome="200",version="0"} 1.0',
        'babylon_first_token_seconds_count{arm="pinned",version="0"} 1.0',
        'babylon_refused_total{status="404"} 1.0',
        "babylon_recorded_calls_total 2.0",
        "babylon_recording_backlog_bytes 0.0",
        "babylon_calls_in_flight 0.0",
    ):
        assert line in lines
