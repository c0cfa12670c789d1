"""The action space of a trader: verb, size and leverage.

``MultiDiscrete([1 + 3 M + 3 P, 4, 7])``, without the last entry if there are no perps:

- The verb: 0 holds; then buy YES, buy NO and sell for each question; then open long, open short and
  close for each perp.
- The size in quarters. A purchase or opening takes quarters of the largest order that the rules and
  the balance allow, in whole cents and including fees. A sale sells quarters of the larger position
  held. A closing closes the whole position.
- The leverage, an index into ``LEVERAGES``.

An order of size zero (no money left, or nothing to sell) is refused by the market, and the tick is
used up.
"""

from functools import cache

import numpy as np
from gymnasium.spaces import MultiDiscrete
from numpy.typing import NDArray

from babylon.game.envs.ledger import Ledger
from babylon.game.envs.vector_core import HOLD, KINDS, Orders
from babylon.game.envs.worlds import Floats, Ints
from babylon.game.market.orders import Decision, Hold, Order, OrderKind
from babylon.game.market.scenario import Rules, Scenario

Action = NDArray[np.int64]
SIZES = 4
LEVERAGES = np.array([1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0])
OF_QUESTION = (OrderKind.BUY_YES, OrderKind.BUY_NO, OrderKind.SELL)
OF_PERP = (OrderKind.OPEN_LONG, OrderKind.OPEN_SHORT, OrderKind.CLOSE)
BY_NUMBER = {number: kind for kind, number in KINDS.items()}


def action_space(questions: int, perps: int) -> MultiDiscrete:
    """Return the action space of one trader."""
    verbs = 1 + len(OF_QUESTION) * questions + len(OF_PERP) * perps
    return MultiDiscrete([verbs, SIZES, len(LEVERAGES)] if perps else [verbs, SIZES])


def to_orders(actions: Action, ledger: Ledger, rules: Rules) -> Orders:
    """Convert actions [B, N, 2 or 3] to orders [B, N]."""
    kinds, targets = _verbs(ledger.shares.shape[2], ledger.size.shape[2])
    kind, target = kinds[actions[..., 0]], targets[actions[..., 0]]
    leverage = LEVERAGES[actions[..., 2]] if actions.shape[-1] > 2 else np.ones(kind.shape)
    part = (actions[..., 1] + 1) / SIZES
    budget = part * np.minimum(rules.max_order, ledger.balance)
    amount = np.minimum(_cents(budget), budget)
    sells = np.nonzero(kind == KINDS[OrderKind.SELL])
    amount[sells] = part[sells] * ledger.shares[(*sells, target[sells])].max(-1)
    opens = np.nonzero((kind >= KINDS[OrderKind.OPEN_LONG]) & (kind < KINDS[OrderKind.CLOSE]))
    amount[opens] = _cents(budget[opens] / (1.0 / leverage[opens] + rules.fee))
    return Orders(kind, target, amount, leverage)


def to_decision(orders: Orders, trader: int, scenario: Scenario) -> Decision:
    """Convert one trader's order of ``orders`` [1, N] to a decision in the scalar game."""
    number, target = int(orders.kind[0, trader]), int(orders.target[0, trader])
    if number == HOLD:
        return Hold()
    kind, amount = BY_NUMBER[number], float(orders.amount[0, trader])
    if kind is not OrderKind.CLOSE and amount <= 0.0:
        return Hold(error=f"amount {amount:g} is not a positive number")
    if not kind.is_perp:
        return Order(scenario.questions[target].market_id, kind, amount)
    leverage = float(orders.leverage[0, trader])
    return Order(scenario.perps[target].ticker, kind, amount, leverage)


@cache
def _verbs(questions: int, perps: int) -> tuple[Ints, Ints]:
    """Return (kind, target) of every verb."""
    kinds = [KINDS[kind] for _ in range(questions) for kind in OF_QUESTION]
    kinds += [KINDS[kind] for _ in range(perps) for kind in OF_PERP]
    targets = [*np.repeat(np.arange(questions), len(OF_QUESTION))]
    targets += [*np.repeat(np.arange(perps), len(OF_PERP))]
    return np.array([HOLD, *kinds]), np.array([0, *targets])


def _cents(dollars: Floats) -> Floats:
    return np.floor(dollars * 100.0) / 100.0
