"""Mutated rows never crash: each is accepted or has a named reason."""

import json
import os
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.core.types import Rejection
from babylon.quality.decode import (
    MAX_DEPTH,
    GameMetrics,
    Reason,
    RejectedError,
    decode,
    decode_plain,
    is_deep,
)
from babylon.quality.row_checks import Accepted, check_row
from tests.faults.mutations import mutated_rows
from tests.unit.quality.rows import QUALITY, WINDOW, compact, real_rows

JUNK = st.sampled_from(
    [None, True, -1, 0, 10**25, 1e308, "", "\0", "pending", "HOLD", [], {}, [[]], {"pnl": "x"}]
)


@cache
def sources():
    return [(game_row, json.loads(game_row.steps_json)) for game_row in real_rows()]


def check(game_row):
    verdict = check_row(game_row, WINDOW, QUALITY)
    assert isinstance(verdict, Accepted | Rejection)
    if isinstance(verdict, Rejection):
        assert verdict.reason in Reason
        assert verdict.detail


@st.composite
def rows_with_one_value_changed(draw):
    game_row, played = draw(st.sampled_from(sources()))
    root = json.loads(compact(played[:6]))
    parent = root
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = draw(st.sampled_from(keys))
        child = parent[key]
        if not isinstance(child, dict | list) or not child or draw(st.booleans()):
            break
        parent = child
    if draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = draw(JUNK)
    return replace(game_row, steps_json=compact(root))


@given(rows_with_one_value_changed())
@settings(max_examples=150)
def test_a_row_with_one_value_changed_never_crashes(game_row):
    check(game_row)


@given(st.data())
@settings(max_examples=100)
def test_a_row_with_broken_text_never_crashes(data):
    game_row, _ = data.draw(st.sampled_from(sources()))
    text = game_row.steps_json
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(
        st.sampled_from(["", "NaN", '"', "{", "]", "\\u0000", "\\ud83d", "1e999,"])
    )
    cut = data.draw(st.integers(0, 40))
    check(replace(game_row, steps_json=text[:at] + inserted + text[at + cut :]))


@given(st.text(max_size=60))
@settings(max_examples=100)
def test_any_text_in_any_json_column_never_crashes(text):
    game_row, _ = sources()[0]
    for column in ("steps_json", "metrics_json", "metadata_json", "reward_components_json"):
        check(replace(game_row, **{column: text}))


def test_plain_text_gets_the_verdict_and_the_values_of_the_slow_way():
    compared = 0
    for game_row in mutated_rows(int(os.environ.get("FUZZ_ROWS", 2_000)), seed=7):
        if decode_plain(game_row.steps_json) is not msgspec.UNSET:
            spaced = replace(game_row, steps_json=game_row.steps_json + " ")
            assert decode_plain(spaced.steps_json) is msgspec.UNSET
            assert check_row(game_row, WINDOW, QUALITY) == check_row(spaced, WINDOW, QUALITY)
            compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"x":{"a":1,"b":[],"a":1}}',
        '{"a\\u0062":1,"ab":1}',
        '["\\u0000"]',
        '{"\\u0000":1}',
        "[18446744073709551616]",
        "[-9223372036854775809]",
        "[1e999]",
        "[NaN]",
        "[-0]",
        '["\ud800"]',
        '["\\ud800"]',
        "[" * 300 + "]" * 300,
        '{"a": 1}',
        "[1] ",
        "",
    ],
)
def test_text_with_a_fault_is_not_plain(text):
    assert decode_plain(text) is msgspec.UNSET


@pytest.mark.parametrize("text", ["[]", '{"a":[1,-2.5,"\\n😀",null,true]}', "18446744073709551615"])
def test_sound_compact_text_is_plain(text):
    assert decode_plain(text) == json.loads(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
@settings(max_examples=60)
def test_sound_json_is_accepted_in_every_spelling(value):
    document = {"finalPnL": 1.5, "extra": value}
    for options in ({}, {"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}):
        text = json.dumps(document, **options)
        sound = is_sound(value)
        if sound:
            assert decode(text, GameMetrics, "metricsJson").final_pnl == 1.5
        else:
            with pytest.raises(RejectedError):
                decode(text, GameMetrics, "metricsJson")


def is_sound(value):
    if isinstance(value, list):
        return all(is_sound(item) for item in value)
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, float):
        return abs(value) < float("inf")
    return not isinstance(value, int) or -(2**63) <= value < 2**64


@pytest.mark.parametrize("inner", ["1", r'"\u0000"', r'{"\u0000": []}'])
def test_only_depth_makes_a_document_deep(inner: str) -> None:
    wide = f"[{','.join(['[]'] * 300)}, {inner}]"
    assert not is_deep(wide)
    assert not is_deep("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert is_deep("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))
