"""The parser against the grammar of the standard and its examples."""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.serving.gateway.event_stream import (
    EventStreamParser,
    ServerSentEvent,
    StreamCut,
    relay,
)
from babylon.serving.gateway.exchange import Exchange
from tests.unit.serving.gateway.test_exchange import exchange

Event = tuple[bytes | None, bytes]
CHARACTERS = st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"])
TEXT = st.text(CHARACTERS, max_size=6)
OTHER_NAME = TEXT.filter(lambda name: ":" not in name and name not in ("", "data"))
COMMENT = TEXT.map(lambda text: f":{text}")
DATA = st.one_of(st.just("data"), st.builds("data:{}{}".format, st.sampled_from(["", " "]), TEXT))
OTHER_FIELD = st.one_of(OTHER_NAME, st.builds("{}:{}".format, OTHER_NAME, TEXT))
LINES = st.lists(st.one_of(COMMENT, DATA, OTHER_FIELD, st.just("")), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def parsed(stream: bytes, cuts: list[int] | None = None) -> list[Event]:
    """Parse a stream that is cut before each of these offsets."""
    parser = EventStreamParser()
    bounds = [0, *sorted(cuts or []), len(stream)]
    chunks = (stream[start:end] for start, end in pairwise(bounds))
    events: list[ServerSentEvent] = [event for chunk in chunks for event in parser.feed(chunk)]
    return [(event.data, event.other_lines) for event in events]


def expected(lines: list[str]) -> list[Event]:
    """The standard's steps, line by line; the lines after the last blank one are discarded."""
    events: list[Event] = []
    data, others = list[str](), list[str]()
    for line in lines:
        field, _, value = line.partition(":")
        if line == "" and (data or others):
            joined = "\n".join(data).encode() if data else None
            events.append((joined, "".join(f"{other}\n" for other in others).encode()))
            data, others = [], []
        elif field == "data":
            data.append(value[1:] if value.startswith(" ") else value)
        elif line:
            others.append(line)
    return events


@given(
    lines=LINES,
    ends=st.lists(ENDS, min_size=12, max_size=12),
    bom=st.sampled_from(["", "\ufeff"]),
    unfinished=st.sampled_from(["", "data: tail", ": tail"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_legal_stream_gives_its_events_however_it_is_cut(
    lines: list[str], ends: list[str], bom: str, unfinished: str, cuts: list[int]
) -> None:
    if not bom and lines and lines[0].startswith("\ufeff"):
        lines = ["", *lines[:11]]
    # a CR before a line that is empty and ends with LF would be one line end, not two
    for index, line in enumerate(lines):
        if index and not line and ends[index - 1] == "\r" and ends[index] == "\n":
            ends[index] = "\r\n"
    pairs = zip(lines, ends, strict=False)
    stream = (bom + "".join(line + end for line, end in pairs) + unfinished).encode()
    events = parsed(stream, [min(cut, len(stream)) for cut in cuts])
    assert events == expected(lines)
    assert events == parsed(stream, list(range(len(stream))))


@pytest.mark.parametrize(
    ("stream", "events"),
    [  # the examples of the standard
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [(b"YHOO\n+2\n10", b"")]),
        (
            b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third\n",
            [(None, b": test stream\n"), (b"first event", b"id: 1\n"), (b"second event", b"id\n")],
        ),
        (b"data\n\ndata\ndata\n\ndata:", [(b"", b""), (b"\n", b"")]),
        (b"data:test\n\ndata: test\n\n", [(b"test", b""), (b"test", b"")]),
    ],
)
def test_examples_of_the_standard(stream: bytes, events: list[Event]) -> None:
    assert parsed(stream) == events


def test_an_event_ends_with_the_byte_of_its_blank_line() -> None:
    parser = EventStreamParser()
    assert [e.data for e in parser.feed(b"data: 1\r\n\r")] == [b"1"]
    assert parser.feed(b"\n") == []
    assert [e.data for e in parser.feed(b"data: 2\r\r")] == [b"2"]


def test_only_the_first_byte_order_mark_is_dropped() -> None:
    assert parsed(b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n") == [
        (b"1", b""),
        (None, b"\xef\xbb\xbfdata: 2\n"),
    ]


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
    assert (call.text, [*call.prompt_token_ids], [*call.token_ids]) == ("é!", [1, 2], [3, 4])
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
    assert call.token_ids[0] == 3


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


@pytest.mark.parametrize(
    "data",
    [
        b"data: 1\n\n",
        b"data: []\n\n",
        b"data: {\n\n",
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
        b'data: {"a":' + 3000 * b"[" + 3000 * b"]" + b"}\n\n",
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":-1}]}}]}\n\n',
    ],
)
async def test_data_that_is_no_json_object_breaks_the_stream_off(data: bytes) -> None:
    with pytest.raises(StreamCut):
        await relayed(data, 10_000, exchange(stream=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", ["x"]),
        ("token_ids", [2**31]),
        ("token_ids", [0.5]),
        ("prompt_token_ids", "text"),
        ("logprobs", {"content": [{"logprob": "low"}]}),
        ("finish_reason", {"a": 1}),
    ],
)
async def test_what_cannot_be_recorded_breaks_the_stream_off(name: str, value: object) -> None:
    choice = {"delta": {"content": "a"}, "token_ids": [3], name: value}
    with pytest.raises(StreamCut, match="another form"):
        await relayed(wire({"choices": [choice]}), 10_000, exchange(stream=True))
    with pytest.raises(StreamCut, match="another form"):
        await relayed(wire({"usage": {"completion_tokens": "2"}}), 9, exchange(stream=True))
