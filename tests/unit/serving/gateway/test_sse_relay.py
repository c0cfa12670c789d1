import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from babylon.serving.gateway.event_stream import StreamCut, relay
from babylon.serving.gateway.exchange import Exchange
from tests.unit.serving.gateway.test_exchange import exchange

CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]},
    {"choices": [{"delta": {"content": "é"}, "token_ids": [3], "logprobs": None}]},
    {"choices": [{"delta": {"content": "!"}, "token_ids": [4], "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]


def wire(*chunks: Any, done: bool = True) -> bytes:
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    return ("".join(events) + ("data: [DONE]\n\n" if done else "")).encode()


async def relayed(data: bytes, size: int, call: Exchange) -> tuple[bytes, bytes]:
    """Relay a stream that arrives in pieces of ``size`` bytes; (what was written, the end)."""
    written = bytearray()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    async def write(body: bytes) -> None:
        written.extend(body)

    end = await relay(pieces(), call, write)
    return bytes(written), end


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_stream_is_noted_whatever_pieces_it_comes_in(size: int) -> None:
    call = exchange(stream=True)
    passed, end = await relayed(wire(*CHUNKS), size, call)
    assert (call.text, call.prompt_token_ids, call.token_ids) == ("é!", [1, 2], [3, 4])
    assert (call.finish_reason, call.completion_tokens) == ("stop", 2)
    assert b"stop" not in passed and b"stop" in end
    *events, done, _ = (passed + end).split(b"\n\n")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [c["choices"][0]["delta"]["content"] for c in chunks] == ["", "é", "!"]
    assert done == b"data: [DONE]"
    assert b"token_ids" not in passed + end and b"usage" not in passed + end


@pytest.mark.parametrize(
    "data",
    [
        wire(*CHUNKS[:2], done=False),
        wire(*CHUNKS, done=False),
        wire(*CHUNKS[:2]),
        wire(*CHUNKS[:2], {"error": {"message": "out of memory"}}),
    ],
)
async def test_stream_without_its_end_is_cut(data: bytes) -> None:
    call = exchange(stream=True)
    with pytest.raises(StreamCut):
        await relayed(data, 50, call)
    assert call.token_ids[:1] == [3]


async def test_comments_and_other_fields_are_relayed_and_data_without_json_is_not() -> None:
    call = exchange(stream=True)
    first, *others = wire(*CHUNKS).split(b"\n\n")
    data = b"\n\n".join(
        [
            b": hello",
            b"id: 7\nevent: chunk\n" + first,
            b"data:",
            *others[:-2],
            b": bye",
            *others[-2:],
        ]
    )
    passed, end = await relayed(data, 10_000, call)
    assert (passed + end).startswith(b": hello\n\nid: 7\nevent: chunk\ndata: {")
    assert b": bye\n\ndata: [DONE]\n\n" in end
    assert call.text == "é!"


@pytest.mark.parametrize("data", [b"data: 1\n\n", b"data: []\n\n", b"data: {\n\n"])
async def test_data_that_is_no_json_object_breaks_the_stream_off(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        await relayed(data, 10_000, exchange(stream=True))
