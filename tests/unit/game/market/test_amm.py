"""Every number here was worked out by hand from k = yes * no."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.game.market.amm import Pool, Side, buy, probability, sell

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
def test_selling_shares_returns_money(yes: float, no: float, side: Side, dollars: float) -> None:
    bought, shares = Pool(yes, no).buy(side, dollars)
    sold, returned = bought.sell(side, shares)
    assert returned == pytest.approx(dollars, rel=1e-6, abs=1e-6)
    assert sold.yes == pytest.approx(yes, rel=1e-6)


@given(reserves, reserves, sides, money)
def test_the_bought_side_gets_dearer(yes: float, no: float, side: Side, dollars: float) -> None:
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
    for formula in (buy, sell):
        one = np.array(formula(yes, no, amount))
        many = np.array(formula(*arrays))
        assert many[:, 0].tolist() == one.tolist()
    assert probability(arrays[0], arrays[1])[0] == probability(yes, no)
