"""Bounds of a play's P&L, from the rules alone.

A player loses at most its start balance, and without perps at most the dollars that its orders may
spend. It wins at most what others lose. A market maker that begins with ``R`` shares of each side
loses at most ``R z / (R + z)`` to z dollars spent on the winning side; the crowd loses at most its
orders, an opponent its start balance. Perps have a leverage of 100, so a bound by rules alone would
be in the ten thousands. There, and in long games, ``CREDIT`` replaces the bound: the gate counts
winnings beyond it as ``CREDIT``, of both players. That changes what is estimated, from mean P&L to
mean credited P&L, and the gate asks for a higher plain mean besides.
"""

from babylon.game.market.amm import INITIAL_RESERVE
from babylon.game.market.scenario import Rules

CREDIT = 2.0  # start balances


def most_lost(rules: Rules) -> float:
    """Return the most dollars that one play can lose."""
    if rules.perps:
        return rules.start_balance
    return min(rules.start_balance, rules.ticks * rules.max_order)


def most_won(rules: Rules) -> float:
    """Return the most dollars that one play can win, at most ``CREDIT`` start balances."""
    credit = CREDIT * rules.start_balance
    if rules.perps:
        return credit
    spent = rules.ticks * rules.max_order / max(1, rules.markets)  # equal parts win most
    makers = rules.markets * INITIAL_RESERVE * spent / (INITIAL_RESERVE + spent)
    others = rules.ticks * rules.noise_order + len(rules.opponents) * rules.start_balance
    return min(makers + others, credit)
