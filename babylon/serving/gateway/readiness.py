"""The gateway's readiness: one state machine, changed by ``TRANSITIONS`` only.

A failed call is evidence against the engine, never a verdict: its client may have made it
fail. A policy whose calls fail one after the other, without an answer between them, is doubted.
Then the gateway asks the engine itself, while calls go on. Only the engine's own silence ends
serving, and only its own answer begins it again.
"""

import logging
import time
from collections import deque
from enum import StrEnum

log = logging.getLogger(__name__)

FAILURES, WINDOW_S = 5, 60.0
"""Failed calls of one policy within these seconds, with no answer between, that make a doubt."""


class State(StrEnum):
    """docs/serving.md explains each state."""

    STARTING = "starting"
    NO_POLICY = "no policy"
    LOADING = "loading"
    SERVING = "serving"
    DOUBTED = "doubted"
    DOWN = "down"


class Event(StrEnum):
    """Events that may change the state."""

    NO_DATABASE = "the database does not answer"
    NO_ROUTE = "the database has no route"
    LACKING = "the engine lacks a policy of the route"
    LOADED = "the engine lists the policies of the route"
    CALLS_FAIL = "calls to the engine fail, and none is answered"
    ENGINE_FAILS = "the engine does not answer the gateway"
    ENGINE_ANSWERS = "the engine answers a call of the gateway's own"


SERVES = frozenset({State.SERVING, State.DOUBTED})
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STARTING: {
        Event.NO_ROUTE: State.NO_POLICY,
        Event.LACKING: State.LOADING,
        Event.LOADED: State.SERVING,
        Event.ENGINE_FAILS: State.DOWN,
    },
    State.NO_POLICY: {Event.LACKING: State.LOADING, Event.LOADED: State.SERVING},
    State.LOADING: {
        Event.NO_ROUTE: State.NO_POLICY,
        Event.LOADED: State.SERVING,
        Event.ENGINE_FAILS: State.DOWN,
    },
    State.SERVING: {
        Event.LACKING: State.LOADING,
        Event.CALLS_FAIL: State.DOUBTED,
        Event.ENGINE_FAILS: State.DOWN,
    },
    State.DOUBTED: {
        Event.LACKING: State.LOADING,
        Event.ENGINE_FAILS: State.DOWN,
        Event.ENGINE_ANSWERS: State.SERVING,
    },
    State.DOWN: {
        Event.NO_ROUTE: State.NO_POLICY,
        Event.LACKING: State.LOADING,
        Event.ENGINE_ANSWERS: State.SERVING,
    },
}


class Readiness:
    """The state, and the reason for it. ``told`` is the reason without addresses and paths."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = self.told = "the gateway is starting"
        self.answered = 0  # calls
        self._failures: dict[str, deque[float]] = {}

    @property
    def unavailable(self) -> str | None:
        """Reason why no call is served, ``None`` if calls are."""
        return None if self.state in SERVES else self.reason

    def note(self, event: Event, reason: str = "") -> None:
        """Change the state as the event demands; an event that it does not know changes nothing."""
        state = TRANSITIONS[self.state].get(event)
        told = reason if event is Event.NO_ROUTE else f"{event}: try again in a moment"
        if state is None:
            if reason and self.state not in SERVES:
                self._explain(reason, told)
            return
        if state is State.SERVING:
            self._failures.clear()
            log.info("serving")
        self.state, before = state, self.state
        self._explain(reason or event, told, changed=before is not state)

    def call_ended(self, policy: str, status: int | None) -> None:
        """Note a call that the engine answered, be it with a refusal."""
        if status is None or status >= 500:
            self.call_failed(policy, f"status {status}")
            return
        self.answered += 1
        if self._failures:
            self._failures.pop(policy, None)

    def call_failed(self, policy: str, reason: str) -> None:
        """Note a call that the engine gave no answer, or a broken one."""
        now = time.monotonic()
        failures = self._failures.setdefault(policy, deque(maxlen=FAILURES))
        failures.append(now)
        if len(failures) == FAILURES and now - failures[0] <= WINDOW_S:
            self.note(Event.CALLS_FAIL, f"{FAILURES} calls of {policy} failed, the last: {reason}")

    def _explain(self, reason: str, told: str, *, changed: bool = False) -> None:
        if self.state is not State.SERVING and (changed or reason != self.reason):
            log.warning("%s: %s", self.state, reason)
        self.reason, self.told = reason, told
