from math import fsum
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.game.fleet.fleet_records import action_of, environment_state
from babylon.game.market.game import Game
from babylon.game.market.orders import Hold, Order, OrderKind
from babylon.game.market.scenario import HOUR, STARTER, Rules, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.quality.correctness import Outcomes
from babylon.quality.decode import GameStep
from babylon.quality.payoffs import payoffs
from tests.unit.quality.rows import step
from tests.worlds import perp, quiet_world


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


def opened(size, price=10.0, side="LONG", leverage=5, change=None):
    parameters = {"ticker": "T", "side": side, "size": size, "leverage": leverage}
    return {
        "actionType": "OPEN_PERP_POSITION",
        "success": True,
        "parameters": parameters,
        "result": {"price": price, "fee": size / 1000},
        "correctness": {"priceChange": change},
    }


def closed(size, pnl):
    return {
        "actionType": "CLOSE_PERP_POSITION",
        "success": True,
        "parameters": {"ticker": "T", "side": "LONG", "size": size},
        "result": {"pnl": pnl},
    }


def ends_at(price):
    return Outcomes([{"stockTicker": "T", "startPrice": 10.0, "endPrice": price}])


@pytest.mark.parametrize(("end", "opener", "closer"), [(10.0, -0.1, 30.0), (15.0, 49.9, -20.0)])
def test_closing_a_perpetual_is_compared_with_holding_to_the_last_price(end, opener, closer):
    """$100 opened at 10 and closed at 13 with 30: at 10 in the end, 30 were saved; at 15, 20 lost.
    To pay the opener for all of it gives 29.9 and 0 in both cases."""
    found = of([opened(100), HOLD, closed(100, 30.0)], 29.9, ends_at(end))
    assert found == pytest.approx([opener, 0, closer])


def test_a_partial_closing_takes_a_share_of_every_lot():
    """$100 at 10 and $300 at 12, a quarter closed at 15 with 50 / 4 + 75 / 4 = 31.25; 12 in the
    end: the lots make 20 and 0, of which the closed quarter would have made 5."""
    plays = [opened(100), opened(300, 12.0), closed(100, 31.25)]
    assert of(plays, 31.25 + 15 - 0.4, ends_at(12.0)) == pytest.approx([19.9, -0.3, 26.25])
    rest = [*plays, closed(300, 90.0)]  # the others at 16: 45 + 75 = 120, of which 90 are made
    found = of(rest, 31.25 + 90.0 - 0.4, ends_at(12.0))
    assert found == pytest.approx([19.9, -0.3, 26.25, 75.0])


def test_a_turn_from_long_to_short_is_two_decisions():
    """Long $100 from 10, closed at 8 with -20, then short $100 from 8; 4 in the end."""
    turn = [opened(100), closed(100, -20.0), opened(100, 8.0, "SHORT")]
    assert of(turn, -20 + 50 - 0.2, ends_at(4.0)) == pytest.approx([-20.1, 0, 49.9])
    # held on, the long would have lost its margin of $20 by the end, and no more


def test_a_position_that_was_liquidated_has_its_own_end_and_not_the_last_price():
    found = of([opened(100, change=-18.0), HOLD], -20.1, ends_at(20.0))
    assert found == pytest.approx([-20.1, 0])


def test_without_a_last_price_a_closing_is_the_end_of_its_lots():
    plays = [opened(100), opened(300), closed(400, 80.0)]
    assert of(plays, 79.6) == pytest.approx([19.9, 59.7, 0])


PRICES = (100.0, 110.0, 120.0, 90.0, 105.0)


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        # closed at 120, 20 % and a fee; held on, 5 % and the same fee
        (["long 100 1", "", "close"], [4.8, 0, 15.0]),
        # from 110, a tenfold position is liquidated at 100.1: to close it at 120 saves 11 besides
        (["", "long 110 10"], [0, -11.11]),
        (["", "long 110 10", "close"], [0, -11.11, 20.89]),
        # a closing ends both directions: realised 29.68, held on 14.68
        (["long 100 1", "short 220 2", "", "close"], [4.8, 9.56, 0, 15.0]),
        (["long 100 1", "close", "short 220 2"], [4.8, 5.0, 27.06]),
        # the second order takes the first along into a liquidation at 104.1
        (["long 100 2", "long 1100 100"], [4.8, -67.0]),
    ],
)
def test_the_payoffs_of_our_own_perpetuals_by_hand(orders, expected):
    game = Game(quiet_world(ticks=4, fee=0.001, perps=[perp(*PRICES)]))
    kinds = {"long": OrderKind.OPEN_LONG, "short": OrderKind.OPEN_SHORT, "close": OrderKind.CLOSE}

    def decide(tick):
        if tick >= len(orders) or not orders[tick]:
            return Hold()
        kind, *numbers = orders[tick].split()
        return Order("OPNAI", kinds[kind], *map(float, numbers or ["0"]))

    steps, pnl = recorded(game, decide)
    found = [one.pnl_usd for one in payoffs(steps, Outcomes([]), "", pnl)]
    assert found == pytest.approx([*expected, 0, 0, 0, 0][:4])


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

    def decide(tick):
        agent = SCRIPTED_AGENTS[
            random.choice(["news", "random", "maker", "contrarian", "momentum"])
        ]
        decision = agent(game, random)
        return decision if random.random() < 0.9 else Hold(error="malformed")

    return game, *recorded(game, decide)


def recorded(game, decide):
    """Play a game to its end → (its steps as they are recorded, its P&L)."""
    states = []
    while not game.over:
        states.append(environment_state(game))
        game.act(decide(game.tick))
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
    return msgspec.convert(rows, tuple[GameStep, ...]), pnl


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
        # half of the smallest number is 0: the partial closing leaves lots of no size
        [opened(5e-324), opened(5e-324), closed(5e-324, 1.0), closed(None, 2.0)],
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
