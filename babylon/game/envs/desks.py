"""Trading in all worlds at once, one trader per world.

The checks are those of ``market/prediction_desk.py`` and ``market/perp_desk.py``, in the same
order, with the same formulas. A refused order changes nothing.
"""

from dataclasses import dataclass

import numpy as np

from babylon.game.envs.ledger import SIGN, Ledger
from babylon.game.envs.worlds import Bools, Floats, Ints
from babylon.game.market import amm, perps
from babylon.game.market.orders import OrderKind
from babylon.game.market.scenario import Rules

HOLD = 0
KINDS = {kind: number for number, kind in enumerate(OrderKind, start=1)}
BUY_YES, BUY_NO = KINDS[OrderKind.BUY_YES], KINDS[OrderKind.BUY_NO]
OPEN_LONG, OPEN_SHORT = KINDS[OrderKind.OPEN_LONG], KINDS[OrderKind.OPEN_SHORT]


@dataclass(frozen=True, slots=True)
class Orders:
    """One decision per trader; all arrays have the same shape.

    ``kind`` is ``HOLD`` or one of ``KINDS``. ``target`` is the index of a question or a perp.
    """

    kind: Ints
    target: Ints
    amount: Floats  # dollars; shares for a sale; dollars of notional for a perp
    leverage: Floats

    def of(self, rows: Ints, traders: Ints) -> "Orders":
        where = (rows, traders)
        return Orders(
            self.kind[where], self.target[where], self.amount[where], self.leverage[where]
        )


def trade(ledger: Ledger, rules: Rules, price: Floats, traders: Ints, orders: Orders) -> Bools:
    """Carry out one order per world → mask of those that were not refused [B].

    Args:
        price: ``[B, P]`` the perps' prices.
        traders: ``[B]`` each world's trader.
        orders: ``[B]`` the traders' orders.
    """
    done: Bools = orders.kind == HOLD
    done[_buy(ledger, rules, traders, orders)] = True
    done[_sell(ledger, rules, traders, orders)] = True
    if price.shape[1]:
        done[_open(ledger, rules, price, traders, orders)] = True
        done[_close(ledger, rules, price, traders, orders)] = True
    return done


def _buy(ledger: Ledger, rules: Rules, traders: Ints, orders: Orders) -> Ints:
    rows = np.flatnonzero((orders.kind == BUY_YES) | (orders.kind == BUY_NO))
    market, dollars = orders.target[rows], orders.amount[rows]
    fine = ledger.open[rows, market] & (dollars > 0.0) & (dollars <= rules.max_order)
    fine &= dollars <= ledger.balance[rows, traders[rows]]
    rows, market, dollars = rows[fine], market[fine], dollars[fine]
    trader, side = traders[rows], orders.kind[rows] - BUY_YES
    fee = dollars * rules.fee
    ledger.balance[rows, trader] -= dollars
    ledger.exchange[rows] += fee
    ledger.shares[rows, trader, market, side] += mint(ledger, rows, market, side, dollars - fee)
    return rows


def mint(ledger: Ledger, rows: Ints, market: Ints, side: Ints, dollars: Floats) -> Floats:
    """Mint pairs for dollars and swap the unwanted half into the pool → shares received."""
    own, other, shares = amm.buy(
        ledger.reserves[rows, market, side], ledger.reserves[rows, market, 1 - side], dollars
    )
    ledger.reserves[rows, market, side] = own
    ledger.reserves[rows, market, 1 - side] = other
    ledger.pairs[rows, market] += dollars
    return shares


def _sell(ledger: Ledger, rules: Rules, traders: Ints, orders: Orders) -> Ints:
    """Sell ``amount`` shares of the larger position in a market."""
    rows = np.flatnonzero(orders.kind == KINDS[OrderKind.SELL])
    market, amount = orders.target[rows], orders.amount[rows]
    held = ledger.shares[rows, traders[rows], market]
    owned = held.max(1)
    fine: Bools = ledger.open[rows, market] & (owned > 0.0) & (amount > 0.0)
    side: Ints = held[fine].argmax(1)
    rows, market = rows[fine], market[fine]
    trader, shares = traders[rows], np.minimum(amount[fine], owned[fine])
    own, other, proceeds = amm.sell(
        ledger.reserves[rows, market, side], ledger.reserves[rows, market, 1 - side], shares
    )
    fee = proceeds * rules.fee
    ledger.reserves[rows, market, side] = own
    ledger.reserves[rows, market, 1 - side] = other
    ledger.pairs[rows, market] -= proceeds
    ledger.balance[rows, trader] += proceeds - fee
    ledger.exchange[rows] += fee
    ledger.shares[rows, trader, market, side] -= shares
    return rows


def _open(ledger: Ledger, rules: Rules, price: Floats, traders: Ints, orders: Orders) -> Ints:
    rows = np.flatnonzero((orders.kind == OPEN_LONG) | (orders.kind == OPEN_SHORT))
    size, leverage = orders.amount[rows], orders.leverage[rows]
    fine = (leverage >= 1.0) & (leverage <= perps.MAX_LEVERAGE) & (size >= perps.MIN_SIZE)
    rows, size, leverage = rows[fine], size[fine], leverage[fine]
    margin, fee = size / leverage, size * rules.fee
    cost = margin + fee
    fine = (cost <= rules.max_order) & (cost <= ledger.balance[rows, traders[rows]])
    rows, size, margin, fee, cost = rows[fine], size[fine], margin[fine], fee[fine], cost[fine]
    trader, perp, way = traders[rows], orders.target[rows], orders.kind[rows] - OPEN_LONG
    ledger.balance[rows, trader] -= cost
    ledger.exchange[rows] += fee
    where = (rows, trader, perp, way)
    before, now = ledger.size[where], price[rows, perp]
    entry = np.where(before > 0.0, perps.joint_entry(before, ledger.entry[where], size, now), now)
    size, margin = before + size, ledger.margin[where] + margin
    ledger.size[where], ledger.margin[where], ledger.entry[where] = size, margin, entry
    ledger.limit[where] = perps.liquidation_price(entry, size / margin, SIGN[way])
    return rows


def _close(ledger: Ledger, rules: Rules, price: Floats, traders: Ints, orders: Orders) -> Ints:
    rows = np.flatnonzero(orders.kind == KINDS[OrderKind.CLOSE])
    perp = orders.target[rows]
    fine = (ledger.size[rows, traders[rows], perp] > 0.0).any(1)
    rows, perp = rows[fine], perp[fine]
    where = (rows, traders[rows], perp)
    size = ledger.size[where]
    profit = perps.pnl(size, ledger.entry[where], price[rows, perp, None], SIGN)
    profit -= size * rules.fee
    ledger.balance[rows, traders[rows]] += (ledger.margin[where] + profit).sum(1)
    ledger.exchange[rows] -= profit.sum(1)
    ledger.clear_positions(where)
    return rows
