"""Trading perps, with the money written out: $1,000 to start with, 0.1 % of the size in fees."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.game.market.game import Game
from babylon.game.market.orders import Hold, Order, OrderKind
from babylon.game.market.perps import Direction
from babylon.game.market.scenario import Scenario
from tests.worlds import perp, quiet_world

LONG, SHORT, CLOSE = OrderKind.OPEN_LONG, OrderKind.OPEN_SHORT, OrderKind.CLOSE


def world(*prices: float, rate: float = 0.0, start_minute: int = 60) -> Scenario:
    return quiet_world(
        ticks=len(prices) - 1,
        fee=0.001,
        perps=[perp(*prices, rate=rate)],
        start_minute=start_minute,
    )


def order(kind: OrderKind, size: float = 500, leverage: float = 5) -> Order:
    return Order("OPNAI", kind, size, leverage)


@pytest.mark.parametrize(("kind", "price"), [(LONG, 210.0), (SHORT, 190.0)])
def test_a_right_bet_makes_size_times_change_less_fees(kind: OrderKind, price: float) -> None:
    """500 / 5 = 100 of margin and 0.50 of fee; 5 % of 500 is 25; another 0.50 of fee."""
    game = Game(world(200.0, price, price))
    opened = game.act(order(kind))
    assert opened.success and opened.action_type == "OPEN_PERP_POSITION"
    assert game.balance == pytest.approx(899.5)
    assert game.equity == pytest.approx(899.5 + 100 + 25)
    closed = game.act(order(CLOSE))
    assert closed.realised_pnl == pytest.approx(24.5)
    assert game.balance == pytest.approx(1024)
    assert not game.positions
    assert game.won(opened) and game.won(closed)


def test_what_is_open_at_the_end_is_closed_at_the_last_price() -> None:
    game = Game(world(200.0, 190.0, 180.0))
    opened = game.act(order(LONG))
    game.act(Hold())
    assert game.won(opened) is None
    assert game.settle() == pytest.approx(-0.5 - 50 - 0.5)
    assert game.won(opened) is False
    assert game.settle() == pytest.approx(-51)  # settled once is settled


@pytest.mark.parametrize(("kind", "price"), [(LONG, 182.0), (SHORT, 218.0), (LONG, 50.0)])
def test_at_the_liquidation_price_only_the_margin_is_lost(kind: OrderKind, price: float) -> None:
    """1000 / 10 = 100 of margin, 1 of fee; 200 * (1 -/+ 0.09) is 182 or 218."""
    game = Game(world(200.0, price, 200.0))
    exchange = game.market.exchange.balance
    opened = game.act(order(kind, 1000, 10))
    assert not game.positions
    assert game.balance == pytest.approx(899)
    assert game.market.exchange.balance - exchange == pytest.approx(101)
    assert opened.perp is not None and opened.perp.exit.liquidated
    assert opened.perp.exit.price == pytest.approx(182 if kind is LONG else 218)
    assert game.won(opened) is False


def test_a_cent_above_the_liquidation_price_the_position_lives() -> None:
    game = Game(world(200.0, 182.01, 200.0))
    game.act(order(LONG, 1000, 10))
    assert game.pnl == pytest.approx(-1 + 1000 * (182.01 / 200 - 1))
    game.act(order(CLOSE))
    assert game.balance == pytest.approx(1000 - 1 - 89.95 - 1)


def test_an_enlarged_position_has_one_entry_and_one_liquidation_price() -> None:
    """$100 at 100 and $300 at 150: 400 / (1 + 2) = 133.33; margins 100 and 100, leverage 2;
    liquidated at 133.33 * (1 - 0.45) = 73.33; at 160 it has made 60 + 20."""
    game = Game(world(100.0, 150.0, 160.0, 160.0))
    game.act(order(LONG, 100, 1))
    game.act(order(LONG, 300, 3))
    ((key, position),) = game.positions.items()
    assert key == ("OPNAI", Direction.LONG)
    assert (position.size, position.margin, position.leverage) == (400, 200, 2)
    assert position.entry == pytest.approx(400 / 3)
    assert position.liquidation_price == pytest.approx(400 / 3 * 0.55)
    assert game.act(order(CLOSE)).realised_pnl == pytest.approx(80 - 0.4)


def test_both_directions_of_a_ticker_are_closed_together() -> None:
    game = Game(world(100.0, 110.0, 120.0, 120.0))
    game.act(order(LONG, 100, 1))
    game.act(order(SHORT, 330, 3))
    closed = game.act(order(CLOSE))
    assert not game.positions
    assert closed.realised_pnl == pytest.approx(20 - 30 - 0.1 - 0.33)
    assert closed.perp is not None and closed.perp.direction is Direction.SHORT


@pytest.mark.parametrize(("kind", "paid"), [(LONG, 0.2), (SHORT, -0.2)])
def test_funding_is_paid_when_the_clock_strikes_eight(kind: OrderKind, paid: float) -> None:
    game = Game(world(200.0, 200.0, 200.0, 200.0, rate=0.0002, start_minute=8 * 60 - 2))
    game.act(order(kind, 1000, 10))  # 7:58
    assert game.balance == pytest.approx(899)
    game.act(Hold())  # 7:59
    assert game.balance == pytest.approx(899 - paid)
    game.act(Hold())
    assert game.balance == pytest.approx(899 - paid)


def test_a_balance_pays_funding_as_far_as_it_goes() -> None:
    game = Game(world(200.0, 200.0, 200.0, rate=0.01, start_minute=8 * 60 - 2))
    game.act(order(LONG, 10_000, 100))
    game.account.balance = 30.0
    game.act(Hold())
    assert game.balance == 0  # 1 % of 10,000 would have been 100


@pytest.mark.parametrize(
    ("refused", "complaint"),
    [
        (Order("NVDT", LONG, 100), "'NVDT' does not exist: choose one of OPNAI"),
        (order(LONG, 9.99), "below the smallest size 10"),
        (order(LONG, 100, 101), "leverage 101 is not between 1 and 100"),
        (order(LONG, 100, 0.5), "leverage 0.5 is not between 1 and 100"),
        (order(LONG, 100, float("nan")), "leverage nan is not between"),
        (order(LONG, 150, 1), "150.15 are above the largest order 150"),
        (order(CLOSE), "no position in perp 'OPNAI' to close"),
    ],
)
def test_a_refused_order_costs_the_tick_and_nothing_else(refused: Order, complaint: str) -> None:
    game = Game(world(200.0, 200.0))
    outcome = game.act(refused)
    assert not outcome.success and complaint in (outcome.error or "")
    assert outcome.action_type in ("OPEN_PERP_POSITION", "CLOSE_PERP_POSITION")
    assert game.tick == 1 and game.balance == 1000 and not game.positions


def test_margin_and_fee_must_be_on_the_balance() -> None:
    game = Game(world(*[200.0] * 9))
    for _ in range(6):
        assert game.act(order(LONG, 149, 1)).success
    assert "above the balance" in (game.act(order(LONG, 149, 1)).error or "")


def test_where_there_are_no_perps_none_can_be_traded() -> None:
    game = Game(quiet_world())
    assert "none is listed" in (game.act(order(LONG)).error or "")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_the_payoffs_of_all_orders_are_the_pnl(seed: int) -> None:
    """Liquidations, enlarged positions, hedges and refusals included; there is no funding."""
    random = Random(seed)
    prices = [100.0]
    while len(prices) < 20:
        prices.append(round(prices[-1] * (1 + random.gauss(0, 0.03)), 2))
    game = Game(world(*prices))
    while not game.over:
        kind = random.choice([LONG, SHORT, CLOSE])
        game.act(order(kind, random.choice([50, 500]), random.choice([1, 5, 30])))
    pnl = game.settle()
    payoffs = [outcome.perp.payoff for outcome in game.outcomes if outcome.perp]
    assert sum(payoffs) == pytest.approx(pnl, abs=1e-6)
