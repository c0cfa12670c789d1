"""The gate of a task before any policy plays."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from babylon.core.errors import ArenaError
from babylon.core.trajectories import Trajectory
from babylon.evaluation.tasks import task_gate
from babylon.evaluation.tasks.recorded_prompts import RecordedPrompts

judged: Any = RecordedPrompts(None)  # type: ignore[arg-type]


async def test_a_gate_without_worlds_says_why_there_is_no_recorded_play(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_held_out(*_: object) -> tuple[Sequence[Trajectory], str]:
        return [], "no held-out play: all that was recorded was trained on"

    monkeypatch.setattr(task_gate, "held_out_play", none_held_out)
    unused: Any = None
    with pytest.raises(ArenaError, match=r"all that was recorded .*: set TARGET_TRAJECTORIES belo"):
        await task_gate.task_verdict(
            unused, unused, 1, unused, unused, None,
            name=f"{__name__}:judged", seed="s", budget=8, model="babylon",
        )  # fmt: skip


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
