"""Every number here was worked out by hand from k = yes * no."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.game.market.amm import Pool, Side, buy, probability, reserve_at, sell

reserves = st.floats(10, 10_000)
money = st.floats(0.01, 5_000)
sides = st.sampled_from(Side)


def test_a_fresh_pool_is_at_even_odds() -> None:
    assert Pool().probability == 0.5


def test_buying_yes_mints_a_pair_and_swaps_the_no_half() -> None:
    pool, shares = Pool().buy(Side.YES, 100)
    assert pool.no == 600
    assert pool.yes == pytest.approx(250_000 / 600)
    assert shares == pytest.approx(100 + 500 - 250_000 / 600)  # 183.33 shares for $100
    assert pool.probability == pytest.approx(600 / (600 + 250_000 / 600))


def test_a_winning_bet_at_even_odds_makes_money() -> None:
    """The live game pays only the reserve difference: 83.33 shares for $100 can never profit."""
    _, shares = Pool().buy(Side.NO, 100)
    assert shares - 100 == pytest.approx(83.333, abs=1e-3)


@given(reserves, reserves, sides, money)
def test_selling_what_was_bought_returns_the_money(
    yes: float, no: float, side: Side, dollars: float
) -> None:
    bought, shares = Pool(yes, no).buy(side, dollars)
    sold, returned = bought.sell(side, shares)
    assert returned == pytest.approx(dollars, rel=1e-6, abs=1e-6)
    assert sold.yes == pytest.approx(yes, rel=1e-6)


@given(reserves, reserves, sides, money)
def test_the_product_stays_and_the_bought_side_gets_dearer(
    yes: float, no: float, side: Side, dollars: float
) -> None:
    pool = Pool(yes, no)
    after, _ = pool.buy(side, dollars)
    assert after.yes * after.no == pytest.approx(yes * no, rel=1e-9)
    assert after.price(side) >= pool.price(side)


@given(sides, money)
def test_a_pair_of_shares_is_worth_one_dollar(side: Side, dollars: float) -> None:
    pool, _ = Pool().buy(side, dollars)
    assert pool.price(Side.YES) + pool.price(Side.NO) == pytest.approx(1.0)


@given(reserves, reserves, money)
def test_arrays_give_the_numbers_of_floats(yes: float, no: float, amount: float) -> None:
    arrays = [np.array([value, 2 * value]) for value in (yes, no, amount)]
    for formula in (buy, sell, reserve_at):
        third = (0.3, np.array([0.3, 0.6])) if formula is reserve_at else (amount, arrays[2])
        one = np.atleast_1d(formula(yes, no, third[0]))
        many = np.atleast_2d(formula(arrays[0], arrays[1], third[1]))
        assert many[:, 0].tolist() == one.tolist()
    assert probability(arrays[0], arrays[1])[0] == probability(yes, no)


@given(reserves, reserves, st.floats(0.01, 0.99))
def test_an_order_moves_the_price_to_where_it_is_wanted(yes: float, no: float, at: float) -> None:
    pool = Pool(yes, no)
    side, dollars = pool.order_to(at)
    after, _ = pool.buy(side, dollars)
    assert dollars >= 0
    assert after.probability == pytest.approx(at, rel=1e-9)


def test_at_four_to_one_the_other_reserve_is_double() -> None:
    """k = 250,000 and P(YES) = 0.8: NO is sqrt(250,000 * 0.8 / 0.2) = 1000, YES 250."""
    assert reserve_at(500.0, 500.0, 0.8) == pytest.approx(1000)
    assert Pool().order_to(0.8) == (Side.YES, pytest.approx(500))
    assert Pool().order_to(0.2) == (Side.NO, pytest.approx(500))
