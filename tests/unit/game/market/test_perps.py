"""Every number here was worked out by hand from the formulas of ``perps``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.game.market.perps import (
    LIQUIDATED,
    Direction,
    funding,
    headroom,
    joint_entry,
    liquidation_price,
    pnl,
)

prices = st.floats(1, 1000)
sizes = st.floats(10, 100_000)
leverages = st.floats(1, 100)
directions = st.sampled_from(Direction)


def test_a_position_makes_its_size_times_the_change_of_the_price() -> None:
    assert pnl(500.0, 200.0, 210.0, 1.0) == pytest.approx(25)  # 5 % of 500
    assert pnl(500.0, 200.0, 210.0, -1.0) == pytest.approx(-25)
    assert pnl(500.0, 200.0, 150.0, -1.0) == pytest.approx(125)  # 25 % of 500


@pytest.mark.parametrize(
    ("leverage", "long", "short"), [(1.0, 20.0, 380.0), (10.0, 182.0, 218.0), (100.0, 198.2, 201.8)]
)
def test_liquidation_comes_at_nine_tenths(leverage: float, long: float, short: float) -> None:
    """200 * (1 - 0.9 / 10) = 182, and so on."""
    assert liquidation_price(200.0, leverage, Direction.LONG.sign) == pytest.approx(long)
    assert liquidation_price(200.0, leverage, Direction.SHORT.sign) == pytest.approx(short)


@given(sizes, prices, leverages, directions)
def test_at_the_liquidation_price_nine_tenths_of_the_margin_are_lost(
    size: float, entry: float, leverage: float, direction: Direction
) -> None:
    limit = liquidation_price(entry, leverage, direction.sign)
    assert pnl(size, entry, limit, direction.sign) == pytest.approx(-0.9 * size / leverage)


def test_the_entry_of_an_enlarged_position_is_the_harmonic_mean() -> None:
    """$100 at 100 is 1 unit, $300 at 150 are 2: $400 for 3 units, 133.33 each. At 160 the parts
    make 60 and 20, and 400 * (160 / 133.33 - 1) = 80."""
    entry = joint_entry(100.0, 100.0, 300.0, 150.0)
    assert entry == pytest.approx(400 / 3)
    assert pnl(400.0, entry, 160.0, 1.0) == pytest.approx(60 + 20)


@given(sizes, prices, sizes, prices, prices, directions)
def test_an_enlarged_position_makes_what_its_parts_make(
    size: float, entry: float, added: float, price: float, later: float, direction: Direction
) -> None:
    joint = pnl(size + added, joint_entry(size, entry, added, price), later, direction.sign)
    parts = pnl(size, entry, later, direction.sign) + pnl(added, price, later, direction.sign)
    assert joint == pytest.approx(parts, rel=1e-6, abs=1e-6 * (size + added))


def test_headroom_is_what_the_price_may_still_go_against_a_position() -> None:
    assert headroom(185.0, 182.0, Direction.LONG.sign) == 3
    assert headroom(215.5, 218.0, Direction.SHORT.sign) == 2.5
    assert headroom(218.0, liquidation_price(200.0, 10.0, -1.0), -1.0) <= LIQUIDATED


def test_longs_pay_a_positive_funding_rate_and_shorts_receive_it() -> None:
    assert funding(1000.0, 0.0002, Direction.LONG.sign) == pytest.approx(0.2)
    assert funding(1000.0, 0.0002, Direction.SHORT.sign) == pytest.approx(-0.2)
    assert funding(1000.0, -0.0002, Direction.LONG.sign) == pytest.approx(-0.2)


def test_arrays_give_the_numbers_of_floats() -> None:
    size, entry = np.array([500.0, 800.0]), np.array([200.0, 50.0])
    price, sign = np.array([210.0, 45.0]), np.array([1.0, -1.0])
    leverage = np.array([5.0, 20.0])
    rows = list(zip(size.tolist(), entry.tolist(), price.tolist(), sign.tolist(), strict=True))
    assert pnl(size, entry, price, sign).tolist() == [pnl(*row) for row in rows]
    assert joint_entry(size, entry, size, price).tolist() == [
        joint_entry(s, e, s, p) for s, e, p, _ in rows
    ]
    assert liquidation_price(entry, leverage, sign).tolist() == [
        liquidation_price(200.0, 5.0, 1.0),
        liquidation_price(50.0, 20.0, -1.0),
    ]
