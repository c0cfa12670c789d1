"""Datasets whose files say less than a replay needs."""

from dataclasses import replace
from pathlib import Path

import msgspec
import polars as pl
import pytest

from babylon.core.errors import ReplayError
from babylon.dataset.replay.counterfactual import replay
from babylon.dataset.replay.dataset_reader import read_dataset
from babylon.evaluation.arena.play import scripted
from babylon.game.market.scenario import STARTER, Rules, Scenario, make_scenario
from babylon.game.market.scripted import holder

WINDOW = "2025-11-14T09:00"
LIVE = make_scenario("live", Rules(markets=1, perps=1, ticks=4))
LIVE = replace(LIVE, questions=(), news=(None,) * 4, noise=(None,) * 4)


def publish(
    root: Path, scenario: Scenario, prices: str, players: list[str], answered: dict[str, list[int]]
) -> Path:
    """A dataset of one scenario; of each agent the steps in which it answered."""
    tables = {
        "scenarios": {
            "window_id": [WINDOW],
            "players": [players],
            "prices": [prices],
            "missing": [[]],
            "trajectory_ids": [[f"t-{agent}" for agent in answered]],
            "knowledge_json": [msgspec.json.encode(scenario).decode()],
        },
        "trajectories": {
            "trajectory_id": [f"t-{agent}" for agent in answered],
            "agent_id": [*answered],
            "window_id": [WINDOW] * len(answered),
            "scenario_id": [scenario.scenario_id] * len(answered),
            "pnl_usd": [0.0] * len(answered),
            "calls": [
                [{"step": step, "completion": [{"content": '{"action":"hold"}'}]} for step in steps]
                for steps in answered.values()
            ],
        },
    }
    for name, columns in tables.items():
        (root / name).mkdir()
        pl.DataFrame(columns).write_parquet(root / name / "file.parquet")
    return root


@pytest.mark.parametrize("steps", [[0, 1], [0, 1, 2, 3]])
def test_live_answer_times_are_never_invented(tmp_path: Path, steps: list[int]) -> None:
    """Even four replies in four minutes may be two in one of them."""
    (recorded,) = read_dataset(publish(tmp_path, LIVE, "seen", [], {"a": steps}), WINDOW).scenarios
    with pytest.raises(ReplayError, match="t-a: the dataset does not hold the times"):
        replay([recorded], "a")
    (result,) = replay([recorded], "a", scripted(holder))
    assert result.replayed_pnl == 0.0


def test_a_shared_market_without_all_replies_is_named(tmp_path: Path) -> None:
    whole = [*range(STARTER.ticks)]
    answered = {"a": whole, "b": whole[:-1]}
    root = publish(tmp_path, make_scenario("shared"), "exact", ["a", "b", "c"], answered)
    found = read_dataset(root, WINDOW)
    assert not found.scenarios
    (skipped,) = found.skipped
    assert "its market was shared with b, c, whose replies are incomplete" in skipped.reason
