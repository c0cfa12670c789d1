"""Damaged files are read or refused with their place, and raise no other error."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest

from babylon.core.windows import parse_window_id
from babylon.formats.atif import read_atif, write_atif
from babylon.formats.chat_lines import read_chats, write_chat
from babylon.formats.langfuse import read_langfuse
from babylon.formats.langsmith import read_langsmith
from babylon.formats.sharegpt import as_chat
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import Document, ImportFileError, Trace
from babylon.formats.trace_rows import trace_rows
from tests.conftest import CAPTURED
from tests.unit.formats.spans import Traced
from tests.unit.formats.test_atif import REPLY, USER, atif
from tests.unit.formats.test_spans import chat, llm
from tests.unit.formats.traces import call, step, tokens, trace

WINDOW = parse_window_id("2025-11-14T09:00")
MUTANTS = 1_500
JUNK = [
    None, 0, -1, 1e308, 2**63, 2**200, float("inf"), "", "x", "\0", [], {}, [1], {"a": 1}, True,
    "0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-10:00", "2025-11-14T12:00:00",
]  # fmt: skip


FOREIGN = {
    "langfuse": "langfuse-blob.jsonl",
    "langsmith": "langsmith.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "events": "otel-1.36.jsonl",
}


def whole(kind: str) -> list[Any]:
    """Sound documents of a format."""
    one = trace(
        *[step(i, call(f"t{i}"), tokens={0: tokens()} if i else {}) for i in range(3)], step(3)
    )
    if kind == "atif":
        values = [write_atif(one), atif(USER, {**REPLY, "metrics": {"prompt_tokens": 3}}, REPLY)]
    elif kind == "chat":
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "r"}]
        values = [*write_chat(one), {"messages": messages}]
    elif kind in FOREIGN:
        texts = (CAPTURED / FOREIGN[kind]).read_text().splitlines()
        values = [json.loads(one) for one in texts][:2]
        if kind == "events":  # the failed span would refuse every document
            values = [values[0] | values[1]]
            values[0]["resourceSpans"][0]["scopeSpans"][0]["spans"].pop()
    else:
        values = []
        for attributes in (chat("u", "r"), llm("u", "r")):
            traced = Traced()
            traced.span("call", attributes)
            values.append(traced.export())
    return [json.loads(msgspec.json.encode(value)) for value in values]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every (container, key) of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in [*items]:
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def damaged(random: Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    owner, key = random.choice([*places(value)])
    if random.random() < 0.3:
        del owner[key]
    else:
        owner[key] = copy.deepcopy(random.choice(JUNK))
    return value


def read(kind: str, document: Document) -> Iterator[Trace]:
    if kind == "atif":
        return read_atif(document)
    if kind == "chat":
        return read_chats([document], "imported")
    if kind == "langfuse":
        return read_langfuse([document], "imported")
    if kind == "langsmith":
        return read_langsmith([document], "imported")
    if kind == "sharegpt":
        return read_chats([as_chat(document)], "imported")
    return read_span_traces([document], "imported")


@pytest.mark.parametrize("kind", ["atif", "chat", "otlp", *FOREIGN])
def test_a_damaged_file_is_read_or_refused_with_its_place(kind: str) -> None:
    random, sound, results = Random(kind), whole(kind), Counter[str]()
    for _ in range(MUTANTS):
        document = Document("f:1", damaged(random, random.choice(sound)))
        try:
            for one in read(kind, document):
                trace_rows(one, minutes=60, window=WINDOW, now=datetime.now(UTC))
            results["read"] += 1
        except ImportFileError as error:
            assert str(error).startswith("f:1: ")
            results["refused"] += 1
    assert min(results["read"], results["refused"]) > MUTANTS / 20
