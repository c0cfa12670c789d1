"""Constant-product market maker for one YES/NO question.

``k = yes * no`` stays, and ``P(YES) = no / (yes + no)``.

The live game pays out only the reserve difference ``yes - yes'``, so a small buy at even odds
costs about $1 a share and no bet has a positive expected value. Here a buyer's money *mints
pairs*: x dollars become x YES and x NO shares, the unwanted half is swapped into the pool, and the
buyer holds ``x + yes - yes'``. A winning share pays $1, a losing one nothing.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

INITIAL_RESERVE = 500.0


class Side(StrEnum):
    YES = "YES"
    NO = "NO"

    @property
    def other(self) -> "Side":
        return Side.NO if self is Side.YES else Side.YES


@dataclass(frozen=True, slots=True)
class Pool:
    """Reserves of YES and NO shares. Trading returns a new pool."""

    yes: float = INITIAL_RESERVE
    no: float = INITIAL_RESERVE

    @property
    def probability(self) -> float:
        """Price of a YES share in dollars."""
        return self.no / (self.yes + self.no)

    def price(self, side: Side) -> float:
        return self.probability if side is Side.YES else 1.0 - self.probability

    def buy(self, side: Side, dollars: float) -> tuple["Pool", float]:
        """Spend ``dollars`` on one side → (pool afterwards, shares received)."""
        own, other = self._reserves(side)
        other_after = other + dollars
        own_after = own * other / other_after
        return self._with(side, own_after, other_after), dollars + own - own_after

    def sell(self, side: Side, shares: float) -> tuple["Pool", float]:
        """Return ``shares`` of one side → (pool afterwards, dollars received).

        Shares are swapped for pairs, which are burned: x solves
        ``(own + shares - x) * (other - x) = k``.
        """
        own, other = self._reserves(side)
        total = own + shares + other
        gap = own + shares - other
        dollars = (total - math.sqrt(gap * gap + 4.0 * own * other)) / 2.0
        return self._with(side, own + shares - dollars, other - dollars), dollars

    def _reserves(self, side: Side) -> tuple[float, float]:
        return (self.yes, self.no) if side is Side.YES else (self.no, self.yes)

    def _with(self, side: Side, own: float, other: float) -> "Pool":
        return Pool(own, other) if side is Side.YES else Pool(other, own)
