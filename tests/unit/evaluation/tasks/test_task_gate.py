"""The gate of a task before any policy plays."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from babylon.core.errors import ArenaError
from babylon.core.trajectories import Trajectory
from babylon.core.types import Claim, Trained
from babylon.evaluation.tasks import task_gate
from babylon.evaluation.tasks.recorded_prompts import RecordedPrompts

judged: Any = RecordedPrompts(None)  # type: ignore[arg-type]


async def test_a_gate_without_recorded_play_rejects_says_why_and_holds_the_window_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_held_out(*_: object) -> tuple[Sequence[Trajectory], str]:
        return [], "no held-out play: all that was recorded was trained on or taken down"

    async def hours(*_: object) -> frozenset[str]:
        return frozenset()

    monkeypatch.setattr(task_gate, "held_out_play", none_held_out)
    monkeypatch.setattr(task_gate, "trained_hours", hours)
    unused: Any = None
    trained = Trained(
        claim=Claim(window_id="2025-11-14T09:00", epoch=1, owner="worker"),
        batch_id="b",
        policy_version=1,
        parent_version=0,
        checkpoint_uri="x",
        metrics={},
    )
    found = await task_gate.task_verdict(
        unused, trained, 1, unused, unused, None,
        name=f"{__name__}:judged", seed="s", budget=8, model="babylon",
    )  # fmt: skip
    assert found.ruling == "insufficient" and "all that was recorded was tra" in found.reason
    assert "Let the next windows be trained" in found.reason


@pytest.mark.parametrize(
    ("made", "problem"),
    [(None, "returned a NoneType: make a list"), (SystemExit(2), r"called sys\.exit: raise an")],
)
def test_worlds_that_are_none_name_the_mistake(made: Any, problem: str) -> None:
    def worlds(*_: object) -> Any:
        if isinstance(made, SystemExit):
            raise made
        return made

    evaluator: Any = SimpleNamespace(worlds=worlds)
    with pytest.raises(ArenaError, match=problem):
        task_gate._worlds(evaluator, "s", 8, [])
