"""Correctness of trades, from the window's outcomes."""

import msgspec
import pytest

from babylon.core.game_rows import scenario_ticker
from babylon.quality.correctness import Outcomes, StepReward, drawdown_usd, step_rewards
from babylon.quality.decode import GameStep, decode
from babylon.quality.row_checks import Accepted, check_row
from tests.unit.quality.rows import QUALITY, WINDOW, compact, row, step

RESOLVED = {"predictionMarketId": "m1", "outcome": "YES"}
ROSE = {"stockTicker": "T", "startPrice": 100.0, "endPrice": 110.0}


def act(kind, success=True, **rest):
    return {"actionType": kind, "success": success, **rest}


def buy(side="YES", market="m1", **rest):
    return act("BUY_SHARES", parameters={"marketId": market, "side": side}, **rest)


def perp(side="long", **parameters):
    return act("OPEN_PERP_POSITION", parameters={"ticker": "T", "side": side, **parameters})


def played(*actions):
    return [step(number, action=action) for number, action in enumerate(actions)]


def rewards(*actions, outcomes=(RESOLVED, ROSE), scenario="s"):
    steps = decode(compact(played(*actions)), tuple[GameStep, ...], "stepsJson")
    return step_rewards(steps, Outcomes(outcomes), scenario)


def prediction(number, correct, reward):
    return StepReward(step_number=number, prediction_correct=correct, reward=reward)


def test_a_prediction_is_right_when_its_side_is_the_resolution():
    assert rewards(buy("YES"), buy("no")) == (prediction(0, True, 1.0), prediction(1, False, -1.0))


def test_its_reward_is_the_return_on_what_was_paid():
    paid = {"shares": 40.0, "dollars": 25.0}
    assert rewards(buy(result=paid)) == (prediction(0, True, pytest.approx(0.6)),)
    assert rewards(buy("NO", result=paid)) == (prediction(0, False, -1.0),)
    assert rewards(buy(result={"shares": 90.0, "dollars": 9.0})) == (prediction(0, True, 1.0),)


def test_the_coordinators_decisions_count_and_markets_may_be_named_with_their_scenario():
    parameters = {"marketId": "m1", "side": "NO", "marketType": "prediction"}
    decision = act("TRADING_DECISION", parameters=parameters)
    own = {**RESOLVED, "predictionMarketId": "s:m1", "outcome": "NO"}
    assert rewards(decision, outcomes=(own, RESOLVED)) == (prediction(0, True, 1.0),)


@pytest.mark.parametrize(
    ("action", "correct", "reward"),
    [
        (perp("long"), True, 0.1),
        (perp("short"), False, -0.1),
        (perp("SHORT", leverage=5), False, -0.5),
        (perp("long", leverage=50), True, 1.0),
        (perp("long", entryPrice=125.0), False, 110 / 125 - 1),
    ],
)
def test_a_perpetual_is_right_when_the_price_went_its_way(action, correct, reward):
    (found,) = rewards(action)
    assert (found.perp_correct, found.prediction_correct) == (correct, None)
    assert found.reward == pytest.approx(reward)


def test_a_perpetual_of_a_fleet_is_known_by_its_ticker_and_scenario():
    own = {**ROSE, "stockTicker": scenario_ticker("s", "T"), "endPrice": 90.0}
    other = {**ROSE, "stockTicker": scenario_ticker("another", "T")}
    (found,) = rewards(perp("long"), outcomes=(own, other, ROSE))
    assert (found.perp_correct, found.reward) == (False, pytest.approx(-0.1))
    assert rewards(perp("long"), outcomes=(other,)) == ()


@pytest.mark.parametrize(
    "actions",
    [
        [buy(success=False)],
        [buy(market="unknown")],
        [buy(side="MAYBE")],
        [act("BUY_SHARES", parameters={"ticker": "T", "shares": 3})],
        [act("BUY_SHARES", parameters=None)],
        [act("HOLD", parameters={"marketId": "m1", "side": "YES"})],
        [perp(entryPrice=110.0)],
        [buy(), act("SELL_SHARES", parameters={"marketId": "m1"})],
        [perp(), act("CLOSE_PERP_POSITION", parameters={"ticker": "T"}, result={"pnl": -3})],
    ],
)
def test_what_is_refused_unknown_or_closed_before_the_end_is_not_decided_here(actions):
    assert rewards(*actions) == ()


def test_a_sale_that_failed_leaves_the_position_open():
    sale = act("SELL_SHARES", success=False, parameters={"marketId": "m1"})
    assert rewards(buy(), sale) == (prediction(0, True, 1.0),)


@pytest.mark.parametrize(
    "outcome",
    [
        {"predictionMarketId": "m1", "outcome": None},
        {"predictionMarketId": None, "outcome": "YES"},
        {"stockTicker": "T", "startPrice": "NaN", "endPrice": 1.0},
        {"stockTicker": "T", "startPrice": 0, "endPrice": 1.0},
    ],
)
def test_open_questions_and_prices_that_are_none_decide_nothing(outcome):
    assert rewards(buy(), perp(), outcomes=(outcome,)) == ()


def test_wins_count_what_outcomes_say_where_the_step_itself_says_nothing():
    said = {"predictionCorrect": False}
    actions = [buy(), buy(correctness=said), perp("short"), act("HOLD"), act("HOLD")]
    told = row(played(*actions), outcomes_json=compact([RESOLVED, ROSE]))
    verdict = check_row(told, WINDOW, QUALITY)
    assert isinstance(verdict, Accepted)
    assert (verdict.trajectory.wins, verdict.trajectory.trades) == (1, 3)
    assert [reward.step_number for reward in verdict.step_rewards] == [0, 1, 2]
    untold = check_row(row(played(*actions)), WINDOW, QUALITY)
    assert isinstance(untold, Accepted)
    assert (untold.trajectory.wins, untold.trajectory.trades) == (0, 1)
    assert untold.step_rewards == ()


@pytest.mark.parametrize(
    ("lifetime", "pnl", "fall"),
    [
        ([100, 140, 90, 130], 60, 50),  # from 140 to 90; ends at 160
        ([100, 140, 120], -30, 70),  # the last fall is after the last step
        ([5, 5], 0, 0),
        ([-10, -4, 7], 40, 0),
    ],
)
def test_the_drawdown_is_the_largest_fall_from_a_peak(lifetime, pnl, fall):
    state = {"agentBalance": 1, "openPositions": 0}
    path = [step(0, environmentState={**state, "agentPnL": value}) for value in lifetime]
    steps = msgspec.convert(path, tuple[GameStep, ...])
    assert drawdown_usd(steps, pnl) == fall
