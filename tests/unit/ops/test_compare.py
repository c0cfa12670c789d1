"""The sentence of the status page about two policies."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from babylon.ops.status_page.compare import _parts, which_is_better
from babylon.store.policies import Policy


def policy(version: int, parent: int | None, verdict: dict[str, Any] | None = None) -> Policy:
    return Policy(
        policy_version=version,
        parent_version=parent,
        kind="full",
        uri="",
        base_model="tiny",
        window_id=None,
        batch_id=None,
        metrics={},
        verdict=verdict,
        created_at=datetime.now(UTC),
        removed_at=None,
    )


def difference(low: float, high: float) -> dict[str, Any]:
    return {"pnl_difference_low": low, "pnl_difference_high": high}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (difference(2.0, 9.0), "Policy 12 is better than policy 11: +2.0 to +9.0 $ a game"),
        (difference(-9.0, -2.0), "Policy 12 is worse than policy 11: -9.0 to -2.0 $ a game"),
        (
            difference(0.02, 0.127) | {"pnl_after": 0.4, "drawdown_after": None},
            "Policy 12 is better than policy 11: +0.02 to +0.127 in the task's score",
        ),
        (difference(-9.0, 2.0), "Policy 12 is not shown to be better or worse than policy 11"),
        ({"pnl_difference_low": None, "pnl_difference_high": None}, "decided without a match"),
        ({}, "The gate has not compared them yet"),
        (None, "The gate has not compared them yet"),
    ],
)
def test_a_policy_and_its_parent_are_told_apart_by_the_gate(
    verdict: dict[str, Any] | None, words: str
) -> None:
    parent, child = policy(11, 10, difference(50.0, 60.0)), policy(12, 11, verdict)
    assert words in which_is_better(parent, child) == which_is_better(child, parent)


def test_two_policies_of_one_parent_were_not_compared() -> None:
    two = policy(11, 0, difference(1.0, 2.0)), policy(12, 0, difference(5.0, 6.0))
    said = which_is_better(*two)
    assert "better than" not in said and "Both were compared with policy 0" in said
    assert "babylon arena play --a 11 --b 12" in said
    assert "Both" not in which_is_better(policy(0, None), policy(12, 11))


def test_answers_that_repeat_one_word_are_shown_one_after_the_other() -> None:
    again, half = " ".join(["buy"] * 1000), " ".join(["buy", "sell"] * 500)
    began = time.monotonic()
    assert [kind for kind, _ in _parts(again, half)] == ["gone", "new"]
    assert time.monotonic() - began < 1
    assert _parts(again, again) == [("same", again)]
    parts = [("same", "I"), ("gone", "buy"), ("new", "sell"), ("same", "now")]
    assert _parts("I buy now", "I sell now") == parts
