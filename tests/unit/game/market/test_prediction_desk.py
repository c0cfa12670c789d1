"""Trading shares, with the money written out: $1,000 to start with, pools of 500/500."""

import pytest

from babylon.game.market.amm import Side
from babylon.game.market.game import Game
from babylon.game.market.orders import Hold, Order, OrderKind
from babylon.game.market.scenario import Question
from tests.worlds import quiet_world

YES, NO = Question("m1", "Will it?", Side.YES), Question("m1", "Will it?", Side.NO)


def buy(dollars: float = 100, market: str = "m1") -> Order:
    return Order(market, OrderKind.BUY_YES, dollars)


def test_a_right_bet_pays_a_dollar_a_share() -> None:
    """k = 250,000; NO becomes 600 and YES 416.67: 100 + 500 - 416.67 = 183.33 shares."""
    game = Game(quiet_world(YES))
    game.act(buy())
    assert game.balance == 900
    assert game.settle() == pytest.approx(183.3333 - 100, abs=1e-3)


def test_a_wrong_bet_loses_the_stake() -> None:
    game = Game(quiet_world(NO))
    game.act(buy())
    assert game.settle() == pytest.approx(-100)


def test_fees_are_a_tenth_of_a_percent_of_what_goes_in_and_out() -> None:
    game = Game(quiet_world(fee=0.001))
    exchange = game.market.exchange.balance
    bought = game.act(buy())
    assert bought.shares == pytest.approx(99.9 + 500 - 250_000 / 599.9)
    sold = game.act(Order("m1", OrderKind.SELL, bought.shares))
    assert sold.dollars == pytest.approx(99.9 * 0.999)
    assert game.market.exchange.balance - exchange == pytest.approx(0.1 + 0.0999)


def test_a_sale_realises_its_profit() -> None:
    game = Game(quiet_world())
    bought = game.act(buy())
    sold = game.act(Order("m1", OrderKind.SELL, bought.shares / 2))
    held = game.holdings["m1", Side.YES]
    assert sold.success and sold.realised_pnl is not None
    assert held.shares == pytest.approx(bought.shares / 2)
    assert held.cost == pytest.approx(50)
    assert sold.dollars == pytest.approx(game.balance - 900)
    assert sold.realised_pnl == pytest.approx(sold.dollars - 50)
    assert game.pools["m1"].probability > 0.5


def test_a_sale_of_more_than_is_held_sells_what_is_held() -> None:
    game = Game(quiet_world())
    bought = game.act(buy())
    sold = game.act(Order("m1", OrderKind.SELL, 10 * bought.shares))
    assert sold.shares == bought.shares
    assert sold.dollars == pytest.approx(100)
    assert not game.holdings
    assert game.settle() == pytest.approx(0)


def test_shares_too_few_to_count_cannot_be_sold() -> None:
    game = Game(quiet_world())
    assert game.act(buy(1e-15)).shares == 0
    sold = game.act(Order("m1", OrderKind.SELL, 1))
    assert not sold.success and "no position in market 'm1'" in (sold.error or "")
    assert game.settle() == pytest.approx(0)


def test_a_question_pays_when_its_time_has_come_and_is_closed_from_then_on() -> None:
    early = Question("m1", "Will it?", Side.YES, resolves_at=2)
    game = Game(quiet_world(early, Question("m2", "And this?", Side.YES), ticks=5))
    bought = game.act(buy())
    assert game.balance == 900
    game.act(Hold())
    assert game.balance == pytest.approx(900 + 183.3333, abs=1e-3)
    assert not game.holdings and [*game.pools] == ["m2"]
    refused = game.act(buy())
    assert refused.error == "market 'm1' is resolved: it was YES"
    assert game.tick == 3 and game.won(bought)
    assert game.act(buy(market="m2")).success


def test_what_nobody_holds_goes_back_to_the_exchange() -> None:
    """Of 600 pairs the player holds 183.33 YES; pool (416.67 YES) and exchange are one."""
    game = Game(quiet_world(YES))
    game.act(buy())
    assert game.market.predictions.collateral == 600
    assert game.market.exchange.balance == -500
    game.settle()
    assert game.market.predictions.collateral == 0
    assert game.market.exchange.balance == pytest.approx(-500 + 416.6667, abs=1e-3)


@pytest.mark.parametrize(
    ("decision", "complaint"),
    [
        (buy(10, "m9"), "'m9' does not exist: choose one of m1"),
        (buy(151), "above the largest order"),
        (Order("m1", OrderKind.SELL, 10), "no position"),
        (Hold(error="malformed reply: x"), "malformed"),
    ],
)
def test_a_refused_decision_costs_only_the_tick(decision: Order | Hold, complaint: str) -> None:
    game = Game(quiet_world())
    outcome = game.act(decision)
    assert not outcome.success and complaint in (outcome.error or "")
    assert game.tick == 1 and game.balance == 1000 and not game.holdings


def test_more_than_the_balance_is_refused() -> None:
    game = Game(quiet_world(ticks=8))
    for _ in range(6):
        assert game.act(buy(150)).success
    assert "above the balance" in (game.act(buy(150)).error or "")


@pytest.mark.parametrize("amount", [0.0, -50.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [OrderKind.BUY_NO, OrderKind.SELL, OrderKind.OPEN_LONG])
def test_an_order_that_no_reply_can_mean_is_refused_all_the_same(amount, kind) -> None:
    game = Game(quiet_world())
    game.act(buy())
    before = game.balance
    refused = game.act(Order("m1", kind, amount))
    assert not refused.success
    assert game.balance == before
