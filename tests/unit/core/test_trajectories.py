from datetime import UTC, datetime

import msgspec
import polars as pl

from babylon.core.artifacts import read_artifact, write_artifact
from babylon.core.home import Home
from babylon.core.llm_calls import Message
from babylon.core.trajectories import (
    TRAJECTORY_SCHEMA,
    Call,
    Trajectory,
    read_trajectories,
    training_rows,
    trajectory_row,
)

WINDOW = "2025-11-14T09:00"
CALL = Call(
    step=0,
    messages=(Message(role="user", content="Trade? 🚀"),),
    response="HOLD",
    temperature=0.7,
    policy_version=3,
    prompt_token_ids=(1, 2),
    completion_token_ids=(3, 4),
    logprobs=(-0.1, -2.5e-8),
)
TRAJECTORY = Trajectory(
    trajectory_id="t1",
    agent_id="a1",
    window_id=WINDOW,
    scenario_id="s1",
    start=datetime(2025, 11, 14, 9, 2, 0, 17000, tzinfo=UTC),
    end=datetime(2025, 11, 14, 9, 3, tzinfo=UTC),
    pnl_usd=-1 / 3,
    drawdown_usd=2 / 3,
    wins=1,
    trades=2,
    actions=3,
    steps=4,
    calls=(CALL, Call(step=1, messages=CALL.messages, response="BUY")),
)


def frame():
    row = trajectory_row(TRAJECTORY, game_json="[]", knowledge_json='{"secret": 1}')
    return pl.DataFrame([row], schema=TRAJECTORY_SCHEMA)


def test_a_trajectory_survives_its_artifact_exactly(tmp_path):
    (read,) = read_trajectories(
        Home(tmp_path), write_artifact(Home(tmp_path), frame(), window_id=WINDOW)
    )
    assert read == TRAJECTORY
    assert [call.retokenized for call in read.calls] == [False, True]


def test_an_artifact_without_drawdowns_is_read(tmp_path):
    earlier = write_artifact(Home(tmp_path), frame().drop("drawdown_usd"), window_id=WINDOW)
    (read,) = read_trajectories(Home(tmp_path), earlier)
    assert read == msgspec.structs.replace(TRAJECTORY, drawdown_usd=0.0)


def test_training_rows_need_no_column_of_ground_truth(tmp_path):
    scored = frame().with_columns(score=pl.lit(0.25))
    blind = scored.select("trajectory_id", "agent_id", "scenario_id", "score", "calls_json")
    artifact = write_artifact(Home(tmp_path), scored, window_id=WINDOW)
    (row,) = training_rows(Home(tmp_path), artifact)
    assert (row.trajectory_id, row.agent_id, row.scenario_id) == ("t1", "a1", "s1")
    assert (row.score, row.calls) == (0.25, TRAJECTORY.calls)
    assert training_rows(
        Home(tmp_path), write_artifact(Home(tmp_path), blind, window_id=WINDOW)
    ) == [row]
    assert "secret" in read_artifact(Home(tmp_path), artifact)["knowledge_json"][0]
