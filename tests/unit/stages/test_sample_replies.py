"""The order of sampled replies, in which the digest of an update's progress reads them."""

from types import SimpleNamespace
from typing import Any

import pytest

from babylon.core.preferences import PromptReplies
from babylon.core.settings_loading import load_settings
from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.evaluation.preferences.draws import SampledReply
from babylon.stages import sample_replies
from tests.unit.training.test_update import call


async def test_replies_that_were_stored_come_in_the_order_in_which_they_were_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a killed update would not know its own progress, and would start over."""
    points = [  # the most informative first
        DecisionPoint(
            trajectory_id=name,
            agent_id=name,
            scenario_id="s",
            call=call("hold", step=step, prompt_token_ids=(5, 6)),
            disagreement=(0.0, 0.0, 0.0),
        )
        for name, step in (("b", 2), ("a", 10), ("c", 0), ("a", 9))
    ]
    stored: list[PromptReplies] = []

    async def read(*_: object) -> list[PromptReplies]:
        return stored[::-1]

    async def sampled(*_: object) -> list[list[SampledReply]]:
        return [[SampledReply(token_ids=(7, n), text="x") for n in range(4)] for _ in points]

    async def simulated(*_: object) -> list[list[float]]:
        return [[float(number), 1.0, 2.0, 3.0] for number, _ in enumerate(points)]

    async def store(_: object, __: object, replies: list[PromptReplies], ___: object) -> None:
        stored.extend(replies)

    monkeypatch.setattr(sample_replies, "informative", lambda *_: points)
    monkeypatch.setattr(sample_replies, "read_replies", read)
    monkeypatch.setattr(sample_replies, "_sampled", sampled)
    monkeypatch.setattr(sample_replies, "_simulated", simulated)
    monkeypatch.setattr(sample_replies, "store_replies", store)
    settings = load_settings(training={"objective": "dpo"}, preferences={"replies": 4})
    work: Any = SimpleNamespace(
        store=None, settings=settings, parent=SimpleNamespace(policy_version=0), rows=[]
    )
    scored: Any = SimpleNamespace(claim=SimpleNamespace(window_id="2025-11-14T09:00"))
    first = await sample_replies.replies_for(work, scored, settings.judge)
    again = await sample_replies.replies_for(work, scored, settings.judge)
    assert len(stored) == 4 and again == first
    assert [(one.trajectory_id, one.step) for one in first] == [
        ("a", 9),
        ("a", 10),
        ("b", 2),
        ("c", 0),
    ]
