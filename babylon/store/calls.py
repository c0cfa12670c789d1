"""Calls that the gateway answered, with the exact tokens: what tomorrow's training reads."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from datetime import datetime

from babylon.store.connection import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A row of ``babylon.calls``.

    ``logprobs`` ``[T]``: natural logarithms of the distribution that was sampled from (after
    temperature), one for each of the T completion tokens. ``messages`` is JSON.
    """

    call_id: str
    agent_id: str | None
    trajectory_id: str | None
    step_number: int | None
    policy_version: int
    route_version: int
    model: str
    messages: str
    response: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    finish_reason: str
    trainable: bool
    untrainable_reason: str | None
    started_at: datetime
    latency_ms: int


_NAMES = [field.name for field in fields(RecordedCall)]
_INSERT = (
    f"INSERT INTO babylon.calls ({', '.join(_NAMES)})"
    f" VALUES ({', '.join(f'${i + 1}' for i in range(len(_NAMES)))}) ON CONFLICT DO NOTHING"
)


async def insert_calls(store: Store, calls: Iterable[RecordedCall]) -> None:
    """Store them all or none; a call that is there already (same ``call_id``) stays as it is."""
    await store.pool.executemany(_INSERT, [astuple(call) for call in calls])
