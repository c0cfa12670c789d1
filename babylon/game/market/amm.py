"""Constant-product market maker for one YES/NO question.

``k = yes * no`` is constant, and ``P(YES) = no / (yes + no)``.

The live game pays out only the reserve difference ``yes - yes'``: a small purchase at even odds
costs about $1 per share, and no bet has a positive expected value. Here a buyer's money mints
pairs. x dollars become x YES and x NO shares, the unwanted half is swapped into the pool, and the
buyer receives ``x + yes - yes'``. A winning share pays $1, a losing share nothing.

The formulas take floats or numpy arrays. ``Pool`` holds one market's reserves.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

INITIAL_RESERVE = 500.0
Number = TypeVar("Number", float, NDArray[np.float64])


def probability(yes: Number, no: Number) -> Number:
    """Return the price of a YES share in dollars."""
    return no / (yes + no)


def buy(own: Number, other: Number, dollars: Number) -> tuple[Number, Number, Number]:
    """Spend ``dollars`` on the side with the reserve ``own`` → (new own, new other, shares)."""
    other_after = other + dollars
    own_after = own * other / other_after
    return own_after, other_after, dollars + own - own_after


def sell(own: Number, other: Number, shares: Number) -> tuple[Number, Number, Number]:
    """Sell ``shares`` of the side with the reserve ``own`` → (new own, new other, dollars).

    The shares are swapped for pairs, which are burned. The proceeds x solve
    ``(own + shares - x) * (other - x) = k``.
    """
    total = own + shares + other
    gap = own + shares - other
    dollars = (total - _sqrt(gap * gap + 4.0 * own * other)) / 2.0
    return own + shares - dollars, other - dollars, dollars


def _sqrt(value: Number) -> Number:
    """Square root. numpy and math round correctly, so both give the same bits."""
    return np.sqrt(value) if isinstance(value, np.ndarray) else math.sqrt(value)


class Side(StrEnum):
    YES = "YES"
    NO = "NO"

    @property
    def other(self) -> "Side":
        return Side.NO if self is Side.YES else Side.YES


@dataclass(frozen=True, slots=True)
class Pool:
    """A market's reserves of YES and NO shares. Trading returns a new pool."""

    yes: float = INITIAL_RESERVE
    no: float = INITIAL_RESERVE

    @property
    def probability(self) -> float:
        """Price of a YES share in dollars."""
        return probability(self.yes, self.no)

    def price(self, side: Side) -> float:
        return self.probability if side is Side.YES else 1.0 - self.probability

    def buy(self, side: Side, dollars: float) -> tuple["Pool", float]:
        """Spend ``dollars`` on one side → (new pool, shares received)."""
        own, other, shares = buy(*self._reserves(side), dollars)
        return self._with(side, own, other), shares

    def sell(self, side: Side, shares: float) -> tuple["Pool", float]:
        """Sell ``shares`` of one side → (new pool, dollars received)."""
        own, other, dollars = sell(*self._reserves(side), shares)
        return self._with(side, own, other), dollars

    def _reserves(self, side: Side) -> tuple[float, float]:
        return (self.yes, self.no) if side is Side.YES else (self.no, self.yes)

    def _with(self, side: Side, own: float, other: float) -> "Pool":
        return Pool(own, other) if side is Side.YES else Pool(other, own)
