"""What the judge is spared by dropout, by its own count of tokens."""

import json

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.settings import Settings
from babylon.core.trajectories import TRAJECTORY_SCHEMA, trajectory_row
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.prompt_text import count_tokens
from babylon.scoring.judge.savings import saved_tokens
from tests.judged import judged, step

RULER = Settings(scoring={"scorer": "ruler"})


@pytest.fixture
def shown(tmp_path):
    """Nine trajectories, each longer than the one before, and the file they lie in."""
    everyone = [
        judged(f"{n}", n, [step(i, said=f"word {i} " * n, action="BUY") for i in range(n + 1)])
        for n in range(9)
    ]
    rows = [
        trajectory_row(one.trajectory, game_json=json.dumps(one.steps), knowledge_json="{}")
        for one in everyone
    ]
    frame = pl.DataFrame(rows, schema=TRAJECTORY_SCHEMA)
    return everyone, write_artifact(frame, tmp_path, window_id="2025-11-14T09:00")


def test_the_saving_is_what_the_judge_would_have_been_shown_of_the_dropped(shown):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone[5:]]
    expected = sum(count_tokens(condense(one, (), 10**6)) for one in everyone[5:])
    assert saved_tokens(RULER, artifact, dropped) == expected > 0
    assert saved_tokens(RULER, artifact, dropped[1:]) < expected


def test_a_small_context_saves_less_because_less_would_have_been_shown(shown):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone[5:]]
    small = RULER.replace(judge={"context_tokens": 1000})
    assert 0 < saved_tokens(small, artifact, dropped) <= len(dropped) * 100
    assert saved_tokens(small, artifact, dropped) < saved_tokens(RULER, artifact, dropped)


def test_without_a_judge_or_without_dropout_nothing_is_saved(shown):
    everyone, artifact = shown
    dropped = [one.trajectory.trajectory_id for one in everyone]
    assert saved_tokens(Settings(scoring={"scorer": "heuristic"}), artifact, dropped) == 0
    assert saved_tokens(RULER, artifact, []) == 0
