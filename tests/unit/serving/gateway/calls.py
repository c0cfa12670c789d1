"""Recorded calls for tests."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from babylon.store.calls import RecordedCall

CALL = RecordedCall(
    call_id="c0",
    agent_id="agent",
    trajectory_id="trajectory",
    step_number=1,
    policy_version=3,
    route_version=7,
    model="babylon-v3",
    messages='[{"role":"user","content":"é"}]',
    response="BUY",
    prompt_token_ids=[1, 2, 3],
    completion_token_ids=[4, 5],
    logprobs=[-0.5, -1.0],
    temperature=1.0,
    top_p=1.0,
    max_tokens=16,
    seed=None,
    finish_reason="stop",
    trainable=True,
    untrainable_reason=None,
    started_at=datetime(2025, 11, 14, 9, tzinfo=UTC),
    latency_ms=12,
)


def call(number: int, **changes: Any) -> RecordedCall:
    return replace(CALL, call_id=f"c{number}", **changes)
