"""The settings that decide the scores of a window, and those that do not."""

import pytest

from babylon.core.settings import load_settings
from babylon.stages.fingerprint import scoring_fingerprint


def fingerprint(**changes: object) -> str:
    return scoring_fingerprint(load_settings(database_url=None, **changes))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"window_minutes": 30},
        {"min_agents": 5},
        {"min_actions": 9},
        {"reward_threshold": 0.5},
        {"target_trajectories": 10},
        {"max_dropout": 0.1},
        {"include_late": True},
        {"scorer": "ruler"},
        {"judge_model": "other"},
        {"judge_rubric": "trading-v2"},
        {"judge_temperature": 0.5},
        {"judge_passes": 5},
        {"judge_day_usd": 1.0},
        {"judge_heuristic": False},
    ],
    ids=str,
)
def test_a_setting_that_changes_scores_changes_it(change: dict[str, object]) -> None:
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"admin_port": 9000},
        {"wandb_mode": "online"},
        {"wandb_project": "p"},
        {"gpu_timeout_s": 1.0},
        {"judge_concurrency": 2},
        {"judge_timeout_s": 5.0},
        {"lease_s": 5.0},
        {"lookback_hours": 5},
        {"iterations": 2},
        {"learning_rate": 0.1},
        {"arena_scenarios": 64},
        {"deployment_strategy": "ab"},
        {"home": "elsewhere"},
    ],
    ids=str,
)
def test_a_setting_of_anything_else_does_not(change: dict[str, object]) -> None:
    assert fingerprint(**change) == fingerprint()
