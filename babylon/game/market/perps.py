"""Perpetual futures: the formulas, on floats or on numpy arrays alike.

A position is ``size`` dollars of notional at ``entry`` (the price it was opened at), backed by
``margin = size / leverage``; ``sign`` is 1 for long and -1 for short. The price comes from outside
and no order moves it. Fees are a share of ``size``, at opening and at closing.
"""

from enum import StrEnum

from babylon.game.market.amm import Number

MIN_SIZE = 10.0  # dollars of notional an order opens at least
MAX_LEVERAGE = 100.0
LIQUIDATED_SHARE = 0.9  # of the margin: what a loss must reach for a position to be liquidated
FUNDING_MINUTES = 8 * 60  # funding is paid at 00:00, 08:00 and 16:00
LIQUIDATED = 1e-9


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
    """Dollars made since the opening: ``sign * (price / entry - 1) * size``."""
    return sign * (price / entry - 1.0) * size


def liquidation_price(entry: Number, leverage: Number, sign: Number) -> Number:
    """``entry * (1 - sign * 0.9 / leverage)``: there nine tenths of the margin are lost."""
    return entry * (1.0 - sign * LIQUIDATED_SHARE / leverage)


def headroom(price: Number, limit: Number, sign: Number) -> Number:
    """Dollars that the price may still go against a position; at ``LIQUIDATED`` or below there are
    none. (Prices are in cents, and a limit computed in floats may miss a cent by less.)"""
    return sign * (price - limit)


def joint_entry(size: Number, entry: Number, added: Number, price: Number) -> Number:
    """The entry of a position enlarged by ``added`` dollars at ``price``.

    The size-weighted harmonic mean ``(size + added) / (size / entry + added / price)``: with it the
    P&L of the whole is at every later price the sum of what both parts make.
    """
    return (size + added) / (size / entry + added / price)


def funding(size: Number, rate: Number, sign: Number) -> Number:
    """Dollars that a position pays to the exchange at a funding time; negative: it receives."""
    return sign * size * rate


def is_funding_time(minute_of_day: int) -> bool:
    return minute_of_day % FUNDING_MINUTES == 0
