"""The parser against the grammar of the standard and its examples."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.serving.gateway.event_stream import EventStreamParser, ServerSentEvent

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
