"""The settings that decide the scores of a window, and those that do not."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Trajectory
from babylon.scoring.scorer import ScoringContext
from babylon.stages.fingerprint import scoring_fingerprint


def fingerprint(**changes: object) -> str:
    return scoring_fingerprint(load_settings(**changes))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"windows": {"minutes": 30}},
        {"windows": {"min_agents": 5}},
        {"quality": {"min_actions": 9}},
        {"quality": {"reward_threshold": 0.5}},
        {"quality": {"target_trajectories": 10}},
        {"quality": {"max_dropout": 0.1}},
        {"windows": {"include_late": True}},
        {"scoring": {"scorer": "ruler"}},
        {"judge": {"model": "other"}},
        {"judge": {"rubric": "trading-v2"}},
        {"judge": {"temperature": 0.5}},
        {"judge": {"passes": 3}},
        {"judge": {"day_usd": 1.0}},
        {"judge": {"heuristic_fallback": False}},
    ],
    ids=str,
)
def test_a_setting_that_changes_scores_changes_it(change: dict[str, object]) -> None:
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"serving": {"admin_port": 9000}},
        {"tracking": {"mode": "online"}},
        {"tracking": {"project": "p"}},
        {"prefect": {"stage_timeout_s": 1.0}},
        {"judge": {"concurrency": 2}},
        {"judge": {"timeout_s": 5.0}},
        {"windows": {"lease_s": 5.0}},
        {"windows": {"lookback_hours": 5}},
        {"training": {"iterations": 2}},
        {"training": {"learning_rate": 0.1}},
        {"evaluation": {"scenarios": 64}},
        {"deployment": {"strategy": "ab"}},
        {"home": "elsewhere"},
    ],
    ids=str,
)
def test_a_setting_of_anything_else_does_not(change: dict[str, object]) -> None:
    assert fingerprint(**change) == fingerprint()


def test_a_rubric_that_was_edited_changes_it(tmp_path: Path) -> None:
    rubric = tmp_path / "mine.txt"
    found = []
    for text in ("Reward profit.", "Reward patience.", "Reward profit."):
        rubric.write_text(text)
        found.append(fingerprint(judge={"rubric": str(rubric)}))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("setting", ["model_path", "panel"])
def test_a_checkpoint_that_was_replaced_changes_it(tmp_path: Path, setting: str) -> None:
    found = []
    for weights in ("one", "two, trained for longer"):
        (tmp_path / "model.safetensors").write_text(weights)
        found.append(fingerprint(judge={setting: str(tmp_path)}))
    assert found[0] != found[1] == fingerprint(judge={setting: str(tmp_path)})


def reads_settings(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[float]:
    return [context.settings.training.learning_rate or 0.0 for _ in trajectories]


def profit(trajectories: Sequence[Trajectory]) -> list[float]:
    return [trajectory.pnl_usd for trajectory in trajectories]


def fingerprint_of(scorer: str, **changes: object) -> str:
    return fingerprint(scoring={"scorer": f"{__name__}:{scorer}"}, **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"learning_rate": 0.1}},
        {"evaluation": {"scenarios": 64}},
        {"deployment": {"strategy": "ab"}},
        {"model": {"name": "other"}},
    ],
    ids=str,
)
def test_a_scorer_with_a_context_counts_all_settings_that_may_change_a_score(
    change: dict[str, object],
) -> None:
    assert fingerprint_of("reads_settings", **change) != fingerprint_of("reads_settings")
    assert fingerprint_of("profit", **change) == fingerprint_of("profit")


@pytest.mark.parametrize(
    "change",
    [
        {"serving": {"admin_port": 9000}},
        {"tracking": {"mode": "online"}},
        {"prefect": {"stage_timeout_s": 1.0}},
        {"judge": {"timeout_s": 5.0}},
        {"home": "elsewhere"},
    ],
    ids=str,
)
def test_places_and_limits_keep_the_scores_of_every_scorer(change: dict[str, object]) -> None:
    assert fingerprint_of("reads_settings", **change) == fingerprint_of("reads_settings")
