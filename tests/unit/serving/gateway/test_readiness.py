"""The gateway's readiness as a state machine."""

import re
from pathlib import Path

import pytest

from babylon.serving.gateway import readiness
from babylon.serving.gateway.readiness import FAILURES, SERVES, TRANSITIONS, Event, Readiness, State


def serving() -> Readiness:
    ready = Readiness()
    ready.note(Event.LOADED)
    assert ready.unavailable is None
    return ready


def test_failed_calls_raise_a_doubt_only_if_none_between_them_is_answered() -> None:
    ready = serving()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            ready.call_failed("v1", "a stream was cut")
            ready.call_ended("v2", 200)  # another policy says nothing about this one
        ready.call_ended("v1", 400)
    assert ready.state is State.SERVING
    for _ in range(FAILURES):
        ready.call_ended("v1", 500)
    assert ready.state is State.DOUBTED and ready.unavailable is None
    ready.note(Event.ENGINE_ANSWERS)
    ready.call_failed("v1", "the first since")
    assert ready.state is State.SERVING


def test_old_failures_raise_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, now = serving(), [0.0]
    monkeypatch.setattr("babylon.serving.gateway.readiness.time.monotonic", lambda: now[0])
    for _ in range(5 * FAILURES):
        ready.call_failed("v1", "a stream was cut")
        now[0] += 2 * readiness.WINDOW_S / FAILURES
    assert ready.state is State.SERVING


def test_only_an_answer_to_the_gateway_ends_an_outage() -> None:
    ready = serving()
    ready.note(Event.ENGINE_FAILS, "connection refused")
    for event in (Event.LOADED, Event.CALLS_FAIL, Event.ENGINE_FAILS):
        ready.note(event)
        assert ready.state is State.DOWN and ready.unavailable
    ready.note(Event.ENGINE_ANSWERS)
    assert ready.unavailable is None


def test_every_state_can_come_to_serve() -> None:
    for state in State:
        reached, found = {state}, set[State]()
        while reached - found:
            found |= reached
            reached = {after for one in found for after in TRANSITIONS[one].values()}
        assert State.SERVING in found | SERVES & {state}


def test_the_documentation_has_every_transition() -> None:
    page = (Path(__file__).parents[4] / "docs/serving.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| (.+) \| `([a-z ]+)` \|$", page, re.MULTILINE)
    told = {(State(before), Event(event), State(after)) for before, event, after in rows}
    known = {(s, event, after) for s in State for event, after in TRANSITIONS[s].items()}
    assert told == known
