"""Formulas of perpetual futures, for floats and numpy arrays.

A position is ``size`` dollars of notional opened at the price ``entry`` and backed by
``margin = size / leverage``; ``sign`` is 1 for long and -1 for short. Prices come from the
scenario; orders do not move them. A fee, a share of ``size``, is charged at opening and at closing.
"""

from enum import StrEnum

from babylon.game.market.amm import Number

MIN_SIZE = 10.0  # smallest notional of an order, dollars
MAX_LEVERAGE = 100.0
LIQUIDATED_SHARE = 0.9  # a position is liquidated when it has lost this share of its margin
FUNDING_MINUTES = 8 * 60  # funding is paid at 00:00, 08:00 and 16:00
LIQUIDATED = 1e-9  # dollars; see ``headroom``


class Direction(StrEnum):
    LONG = "long"
    SHORT = "short"

    @property
    def sign(self) -> float:
        return 1.0 if self is Direction.LONG else -1.0

    @property
    def other(self) -> "Direction":
        return Direction.SHORT if self is Direction.LONG else Direction.LONG


def pnl(size: Number, entry: Number, price: Number, sign: Number) -> Number:
    """P&L since the opening, in dollars: ``sign * (price / entry - 1) * size``."""
    return sign * (price / entry - 1.0) * size


def liquidation_price(entry: Number, leverage: Number, sign: Number) -> Number:
    """Price at which 90 % of the margin is lost: ``entry * (1 - sign * 0.9 / leverage)``."""
    return entry * (1.0 - sign * LIQUIDATED_SHARE / leverage)


def headroom(price: Number, limit: Number, sign: Number) -> Number:
    """Distance of the price from the liquidation price ``limit``, in dollars.

    A position is liquidated at ``LIQUIDATED`` or below, not at 0: prices are whole cents, and a
    limit computed in floats may miss a cent by a rounding error.
    """
    return sign * (price - limit)


def joint_entry(size: Number, entry: Number, added: Number, price: Number) -> Number:
    """Entry price of a position enlarged by ``added`` dollars at ``price``.

    This is the size-weighted harmonic mean ``(size + added) / (size / entry + added / price)``.
    With it, the P&L of the whole equals the sum of both parts' P&L at every later price.
    """
    return (size + added) / (size / entry + added / price)


def funding(size: Number, rate: Number, sign: Number) -> Number:
    """Dollars that a position pays to the exchange at a funding time; negative: receives."""
    return sign * size * rate
