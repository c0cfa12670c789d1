"""The settings that decide the scores of a window, and those that do not."""

import pytest

from babylon.core.settings import load_settings
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
        {"judge": {"passes": 5}},
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
        {"prefect": {"gpu_timeout_s": 1.0}},
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
