"""Tokens that the judge saves by dropout."""

import json

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.home import Home
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import TRAJECTORY_SCHEMA, trajectory_row
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.evidence import saved_tokens
from babylon.scoring.judge.prompt import count_tokens
from tests.judged import judged, step

JUDGE = JudgeSettings()


@pytest.fixture
def shown(tmp_path):
    """Nine trajectories, each longer than the one before, and their artifact."""
    everyone = [
        judged(f"{n}", n, [step(i, said=f"word {i} " * n, action="BUY") for i in range(n + 1)])
        for n in range(9)
    ]
    rows = [
        trajectory_row(one.trajectory, game_json=json.dumps(one.steps), knowledge_json="{}")
        for one in everyone
    ]
    frame = pl.DataFrame(rows, schema=TRAJECTORY_SCHEMA)
    return everyone, write_artifact(Home(tmp_path), frame, window_id="2025-11-14T09:00")


def test_the_saving_is_what_the_judge_would_have_been_shown_of_the_dropped(shown, tmp_path):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone[5:]]
    expected = sum(count_tokens(condense(one, (), 10**6)) for one in everyone[5:])
    assert saved_tokens("ruler", JUDGE, Home(tmp_path), artifact, dropped) == expected > 0
    assert saved_tokens("ruler", JUDGE, Home(tmp_path), artifact, dropped[1:]) < expected


def test_a_small_context_saves_less_because_less_would_have_been_shown(shown, tmp_path):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone[5:]]
    small = JudgeSettings(context_tokens=1000)
    assert 0 < saved_tokens("ruler", small, Home(tmp_path), artifact, dropped) <= len(dropped) * 100
    assert saved_tokens("ruler", small, Home(tmp_path), artifact, dropped) < saved_tokens(
        "ruler", JUDGE, Home(tmp_path), artifact, dropped
    )


def test_without_a_judge_or_without_dropout_nothing_is_saved(shown, tmp_path):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone]
    assert saved_tokens("heuristic", JUDGE, Home(tmp_path), artifact, dropped) == 0
    assert saved_tokens("ruler", JUDGE, Home(tmp_path), artifact, []) == 0
