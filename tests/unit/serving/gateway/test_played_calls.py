"""Calls of a trajectory that is finished."""

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from babylon.serving.gateway.play import handler
from babylon.serving.gateway.play.events import StepEvent
from babylon.store.connection import Connection
from babylon.store.plays import PlayedCall, StoredPlay

NOW = datetime(2025, 11, 14, 9, tzinfo=UTC)
PLAY = StoredPlay(
    trajectory_id="t",
    key_id="k",
    agent_id="own",
    began_at=NOW,
    started_at=NOW,
    scenario_id="s",
    minutes=60,
    window_id="2025-11-14T09:00",
    finished_at=None,
    next_step=0,
)


def call(number: int, agent_id: str | None) -> PlayedCall:
    return PlayedCall(
        call_id=f"c{number}",
        trajectory_id="t",
        agent_id=agent_id,
        step_number=None,
        started_at=NOW,
        model="babylon-v3",
        policy_version=3,
        messages="[]",
        response="BUY",
        temperature=1.0,
        top_p=1.0,
        max_tokens=16,
        latency_ms=1,
    )


async def test_calls_of_other_agents_are_left_out_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of both, each compared with each, stopped the gateway for a minute."""
    records = [call(number, ("own", "other", None)[number % 3]) for number in range(9)]

    async def read(*_: object) -> Any:
        return records

    def compared(*_: object) -> bool:
        raise AssertionError("two calls are compared")

    monkeypatch.setattr(handler, "played_calls", read)
    monkeypatch.setattr(handler, "require_few_calls", read)
    monkeypatch.setattr(PlayedCall, "__eq__", compared)
    step = StepEvent(type="step", trajectory_id="t", number=0, calls=["c0"])
    kept = await handler._records(cast(Connection, None), PLAY, [(NOW, step)], [])
    assert [one.call_id for one in kept] == ["c0", "c2", "c3", "c5", "c6", "c8"]
