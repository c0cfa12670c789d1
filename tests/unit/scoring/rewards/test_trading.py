"""The trading reward, each part computed by hand, and how custom rewards fail."""

import json
from datetime import UTC, datetime, timedelta

import msgspec
import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.errors import ScoringError
from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.trajectories import (
    TRAJECTORY_SCHEMA,
    read_trajectories,
    trajectory_row,
)
from babylon.quality.decode import Reason
from babylon.scoring.judge.judgment import JudgedTrajectory
from babylon.scoring.rewards.trading import reward_of
from babylon.scoring.scorer import Score, ScoringContext, load_scorer, score
from tests.trajectories import a_trajectory

START = datetime(2025, 11, 14, 9, tzinfo=UTC)


def trajectory(pnl_usd=0.0, minutes=10, steps=1):
    return a_trajectory(
        "t7", agent_id="a7", end=START + timedelta(minutes=minutes), pnl_usd=pnl_usd, steps=steps
    )


def step(minute, pnl=0.0, kind="HOLD", market=None, success=True, balance=1000.0):
    return {
        "stepNumber": minute,
        "timestamp": (START + timedelta(minutes=minute)).timestamp() * 1000,
        "environmentState": {"agentBalance": balance, "agentPnL": pnl, "openPositions": 0},
        "llmCalls": [],
        "action": {
            "actionType": kind,
            "success": success,
            "parameters": {"marketId": market} if market else {},
        },
    }


def reward(steps, **own):
    return reward_of(JudgedTrajectory(trajectory=trajectory(**own), steps=steps, knowledge={}))


def test_the_three_parts_and_their_weights_by_hand():
    steps = (
        step(0, pnl=0, kind="BUY_SHARES", market="m1"),  # m1 held from 0 to 4
        step(2, pnl=-10, kind="BUY_SHARES", market="m2"),  # m2 held from 2 to the end at 10
        step(4, pnl=20, kind="SELL_SHARES", market="m1"),
    )
    found = reward(steps, pnl_usd=100.0)
    # P&L goes 0, -10, +20 and ends at 100: 30 + 80 up, 10 down
    assert found.components == pytest.approx(
        {"profit": 0.5 + 0.1 / 2, "speed": 1 - (4 + 8) / 2 / 10, "consistency": 110 / 120}
    )
    assert found.value == pytest.approx(0.5 * 0.55 + 0.2 * 0.4 + 0.3 * 110 / 120)


@pytest.mark.parametrize(
    ("pnl_usd", "balance", "profit"),
    [
        (500.0, 1000.0, 0.75),
        (500.0, 10_000.0, 0.525),  # by what the agent had
        (500.0, 3.0, 0.75),  # all invested when the window began
        (-5000.0, 1000.0, 0.0),
        (5000.0, 1000.0, 1.0),
    ],
)
def test_profit_is_by_capital_and_within_bounds(pnl_usd, balance, profit):
    assert reward((step(0, balance=balance),), pnl_usd=pnl_usd).components["profit"] == profit


def test_a_position_is_one_of_its_market_until_it_is_closed():
    bought_more = (
        step(0, kind="BUY_SHARES", market="m1"),
        step(3, kind="BUY_SHARES", market="m1"),
        step(5, kind="SELL_SHARES", market="m1"),
        step(6, kind="SELL_SHARES", market="m1"),
        step(8, kind="OPEN_PERP_POSITION", market="TeslAI"),
        step(9, kind="CLOSE_PERP_POSITION", market="TeslAI"),
    )
    assert reward(bought_more).components["speed"] == pytest.approx(1 - (5 + 1) / 2 / 10)


def test_neither_failed_orders_nor_holding_nothing_are_speed():
    refused = (step(0, kind="BUY_SHARES", market="m1", success=False), step(9))
    assert reward(refused).components["speed"] == 0.0
    assert reward((step(0, kind="CREATE_POST"),)).components["speed"] == 0.0
    assert reward((step(0, kind="BUY_SHARES", market="m1"),), minutes=0).components["speed"] == 0.0


def test_consistency_of_a_profit_that_never_moved_is_neutral():
    assert reward((step(0), step(1))).components["consistency"] == 0.5
    assert reward((step(0, pnl=50), step(1, pnl=50)), pnl_usd=-5).components["consistency"] == 0.0
    rounding = (1234.56 + 12.3) - 1234.56 - 12.3
    assert (
        rounding and reward((step(0), step(1)), pnl_usd=rounding).components["consistency"] == 0.5
    )


def test_a_step_that_lacks_a_field_names_the_trajectory_and_the_field():
    untimed = step(0) | {"timestamp": None}
    with pytest.raises(ScoringError, match=r"trajectory t7: .*`\$\[1\].timestamp`"):
        reward((step(0), untimed))


async def scored(tmp_path, steps_of):
    """Score as the stage does, by name and over an artifact of (id, P&L, steps)."""
    rows = []
    for name, pnl_usd, steps in steps_of:
        own = msgspec.structs.replace(trajectory(pnl_usd=pnl_usd), trajectory_id=name)
        game = json.dumps(steps)
        rows.append(trajectory_row(own, game_json=game, knowledge_json="{}"))
    frame = pl.DataFrame(rows, schema=TRAJECTORY_SCHEMA)
    artifact = write_artifact(Home(tmp_path), frame, stage="thinned", window_id=own.window_id)
    context = ScoringContext(
        window_id=own.window_id, settings=Settings(home=tmp_path), store=None, artifact=artifact
    )
    name = "babylon.scoring.rewards.trading:trading_reward"
    return await score(
        name, load_scorer(name), read_trajectories(Home(tmp_path), artifact), context
    )


async def test_it_is_a_scorer_by_name_and_reads_the_steps_from_the_artifact(tmp_path):
    found = await scored(tmp_path, [("t1", 1000.0, [step(0)]), ("t2", -1000.0, [step(0)])])
    assert [one.value for one in found] == pytest.approx([0.5 + 0.3, 0.0])


async def test_steps_without_a_field_or_date_cost_their_own_trajectory_alone(tmp_path):
    broken = [step(0) | {"environmentState": {"agentPnL": 0.0}}]
    dateless = [step(0, kind="BUY_SHARES", market="m1") | {"timestamp": 1e300}]
    plays = [("t1", 0.0, [step(0)]), ("t2", 0.0, broken), ("t3", 0.0, dateless)]
    sound, *refused = await scored(tmp_path, plays)
    assert isinstance(sound, Score)
    assert [one.reason for one in refused] == [Reason.NOT_READABLE] * 2
    assert "trajectory t2" in refused[0].detail and "agentBalance" in refused[0].detail
    assert "trajectory t3: a timestamp is no date" in refused[1].detail


async def test_a_field_that_the_game_does_not_record_fails_the_stage(tmp_path):
    broken = [step(0) | {"environmentState": {"agentPnL": 0.0}}]
    with pytest.raises(ScoringError, match=r"trajectory t1: .*agentBalance"):
        await scored(tmp_path, [("t1", 0.0, broken), ("t2", 0.0, broken)])
