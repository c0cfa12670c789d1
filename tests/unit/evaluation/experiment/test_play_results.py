from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

import pytest

from babylon.evaluation.experiment import play_results
from babylon.evaluation.experiment.play_results import results
from babylon.store.connection import Connection
from babylon.store.experiments import Play

STEPS = (
    '[{"stepNumber":0,"timestamp":1,"environmentState":{"agentBalance":1,"agentPnL":PNL},'
    '"llmCalls":[],"action":{"actionType":"HOLD","success":true}}]'
)


async def test_steps_of_many_plays_are_never_in_memory_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task without P&L has none in its columns, so the steps of a week's plays are read."""
    asked: list[int] = []

    async def steps_of(game: object, names: Sequence[str]) -> dict[str, str]:
        asked.append(len(names))
        return {name: STEPS.replace("PNL", f"-{name}") for name in names}

    monkeypatch.setattr(play_results, "steps_of", steps_of)
    now, game = datetime.now(UTC), cast(Connection, None)
    plays = [
        Play(trajectory_id=f"{n}", unit="a", stage=0, mixed=False, start=now, final_pnl=0.0)
        for n in range(150)
    ]
    found, excluded = await results(game, plays)
    assert asked == [64, 64, 22]
    assert [play.pnl_usd for play in found] == [float(n) for n in range(150)]
    assert not excluded
