from math import fsum
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.game.fleet.fleet_records import action_of, environment_state
from babylon.game.market.game import Game
from babylon.game.market.orders import Hold
from babylon.game.market.scenario import HOUR, STARTER, Rules, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.quality.correctness import Outcomes
from babylon.quality.decode import GameStep
from babylon.quality.payoffs import payoffs
from tests.unit.quality.rows import step


def steps_of(*actions):
    made = [step(number, action=action) for number, action in enumerate(actions)]
    return msgspec.convert(made, tuple[GameStep, ...])


def trade(kind, market, side, shares, dollars):
    result = {"shares": shares, "dollars": dollars}
    parameters = {"marketId": market, "side": side}
    return {"actionType": kind, "success": True, "parameters": parameters, "result": result}


HOLD = {"actionType": "HOLD", "success": True, "parameters": {}}
RESOLVED = Outcomes([{"predictionMarketId": "s:m1", "outcome": "YES"}])


def of(actions, pnl, outcomes=RESOLVED):
    return [one.pnl_usd for one in payoffs(steps_of(*actions), outcomes, "s", pnl)]


def test_a_purchase_pays_what_its_shares_were_worth_in_the_end():
    right, wrong = (
        trade("BUY_SHARES", "m1", "YES", 150, 100),
        trade("BUY_SHARES", "m1", "NO", 90, 60),
    )
    assert of([right, HOLD, wrong], 50 - 60) == [50, 0, -60]


def test_a_sale_is_compared_with_holding_until_the_resolution():
    buy, sell = (
        trade("BUY_SHARES", "m1", "YES", 150, 100),
        trade("SELL_SHARES", "m1", "YES", 50, 45),
    )
    assert of([buy, sell], 45) == [50, -5]


def test_without_a_resolution_a_sale_realises_what_its_purchases_made():
    buy, more = (
        trade("BUY_SHARES", "m2", "YES", 100, 40),
        trade("BUY_SHARES", "m2", "YES", 100, 70),
    )
    sell = trade("SELL_SHARES", "m2", "", 200, 120)
    assert of([buy, more, sell], 10) == [20, -10, 0]


def test_a_perpetuals_profit_belongs_to_the_steps_that_opened_it():
    def opened(size):
        parameters = {"ticker": "T", "side": "LONG", "size": size, "leverage": 5}
        result = {"price": 10.0, "fee": size / 1000}
        return {
            "actionType": "OPEN_PERP_POSITION",
            "success": True,
            "parameters": parameters,
            "result": result,
        }

    closed = {
        "actionType": "CLOSE_PERP_POSITION",
        "success": True,
        "parameters": {"ticker": "T", "side": "LONG", "size": 400},
        "result": {"pnl": 80.0},
    }
    assert of([opened(100), opened(300), closed], 79.6) == pytest.approx([19.9, 59.7, 0])


def test_what_no_trade_explains_is_divided_by_the_stakes():
    buy, more = (
        trade("BUY_SHARES", "m3", "YES", 10, 10),
        trade("BUY_SHARES", "m3", "NO", 30, 30),
    )
    assert of([buy, HOLD, more], 8.0) == [2.0, 0.0, 6.0]
    assert of([HOLD, HOLD], 8.0) == [4.0, 4.0]


def test_a_trade_without_shares_and_dollars_has_the_pnl_that_it_names():
    live = trade("BUY_SHARES", "m1", "", 28, 0) | {"result": {"executed": True, "pnl": 35.5}}
    old = trade("SELL_SHARES", "m9", "YES", 10, 4) | {"result": {"pnl": -2.5}}
    assert of([live, old, HOLD], 33.0) == [35.5, -2.5, 0]


def test_a_failed_action_is_marked():
    refused = {"actionType": "BUY_SHARES", "success": False, "parameters": {}}
    assert [one.failed for one in payoffs(steps_of(refused, HOLD), RESOLVED, "s", 0.0)] == [
        True,
        False,
    ]


def played(rules, seed):
    """A game of an agent that changes its mind at random."""
    game, random = Game(make_scenario(f"payoffs:{seed}", rules)), Random(seed)
    states = []
    while not game.over:
        states.append(environment_state(game))
        agent = SCRIPTED_AGENTS[
            random.choice(["news", "random", "maker", "contrarian", "momentum"])
        ]
        decision = agent(game, random) if random.random() < 0.9 else Hold(error="malformed")
        game.act(decision)
    pnl = game.settle()
    rows = [
        {
            "stepNumber": tick,
            "environmentState": state,
            "llmCalls": [],
            "action": msgspec.to_builtins(action_of(outcome, game, tick)),
        }
        for tick, (state, outcome) in enumerate(zip(states, game.outcomes, strict=True))
    ]
    return game, msgspec.convert(rows, tuple[GameStep, ...]), pnl


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([STARTER, Rules(markets=2, ticks=20, spread=True), HOUR])
)
def test_the_payoffs_of_a_game_sum_to_its_pnl(seed, rules):
    game, steps, pnl = played(rules, seed)
    found = payoffs(steps, Outcomes([]), "", pnl)
    assert fsum(one.pnl_usd for one in found) == pytest.approx(pnl, abs=1e-6)
    assert [one.failed for one in found] == [not outcome.success for outcome in game.outcomes]
    if not rules.perps:
        for one, outcome in zip(found, game.outcomes, strict=True):
            if outcome.action_type == "BUY_SHARES" and outcome.success:
                worth = outcome.shares if game.won(outcome) else 0.0
                assert one.pnl_usd == pytest.approx(worth - outcome.dollars, abs=1e-6)


@pytest.mark.parametrize(
    "actions",
    [
        [trade("BUY_SHARES", "m2", "YES", 1e308, 1e308)] * 2,
        [trade("BUY_SHARES", "m2", "YES", 10**400, 5)],
        [trade("BUY_SHARES", "m2", "YES", 1e-300, 5), trade("SELL_SHARES", "m2", "", 1e-300, 5e9)],
        [trade("BUY_SHARES", "m1", "YES", 1e12, 1e-300), trade("BUY_SHARES", "m1", "YES", 9e11, 1)],
        [
            trade("OPEN_POSITION", "T", "LONG", 1, 1)
            | {"result": {"size": 1e12, "leverage": 1e-300, "entryPrice": 1e-300}}
        ],
    ],
)
def test_numbers_that_no_game_has_leave_the_payoffs_finite(actions):
    prices = Outcomes(
        [
            {"predictionMarketId": "s:m1", "outcome": "YES"},
            {"stockTicker": "T", "startPrice": 1.0, "endPrice": 1e12},
        ]
    )
    found = of(actions, 7.0, prices)
    assert fsum(found) == pytest.approx(7.0, abs=1e-3)
    assert max(map(abs, found)) <= 1e12
