"""The game in B worlds at once with N traders each: the vectorised version of ``market.Market``.

It uses the same formulas and the same order of events as the scalar game. A test compares every
balance, pool, position and reward of both. The feed moves no money and is left out; scripted
opponents are not supported.

In each world, one trader after the other trades. The checks are those of
``market/prediction_desk.py`` and ``market/perp_desk.py``, in the same order, with the same
formulas. A refused order changes nothing.
"""

from dataclasses import dataclass

import numpy as np

from babylon.game.envs.ledger import SIGN, Ledger, blank
from babylon.game.envs.worlds import Bools, Floats, Ints, Worlds
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


class Core:
    """B rows, each playing one world.

    ``step`` carries out one decision per trader and begins the next tick; the last tick settles.
    Rows that are ``over`` must be started again before the next step.
    """

    def __init__(self, worlds: Worlds, rows: int) -> None:
        if worlds.rules.opponents:
            names = ", ".join(worlds.rules.opponents)
            raise ValueError(f"opponents ({names}) play only in the scalar game: use TraderEnv")
        self.worlds = worlds
        self.rules = worlds.rules
        self.rows = np.arange(rows)
        self.ledger: Ledger = blank(rows, worlds.traders, worlds.questions, worlds.perps)
        self.equity = np.zeros((rows, worlds.traders))

    @property
    def over(self) -> Bools:
        """Mask of the rows whose world has ended. [B]"""
        return self.ledger.tick >= self.rules.ticks

    @property
    def price(self) -> Floats:
        """The perps' prices in dollars. [B, P]"""
        return self.worlds.price[self.ledger.world, self.ledger.tick]

    def start(self, rows: Ints, worlds: Ints) -> None:
        """Begin ``worlds`` in ``rows``."""
        self.ledger.start(rows, worlds, self.rules.start_balance)
        self.equity[rows] = self.rules.start_balance
        self._begin_tick(rows)

    def step(self, orders: Orders) -> tuple[Floats, Bools]:
        """Play one tick → change of equity in dollars [B, N], mask of carried-out orders [B, N].

        Raises:
            ValueError: A row is over.
        """
        if self.over.any():
            raise ValueError(f"rows {np.flatnonzero(self.over)} are over: start them again")
        done = self._carry_out(orders)
        self._end_tick()
        before, self.equity = self.equity, self.ledger.equity(self.price)
        return self.equity - before, done

    def _carry_out(self, orders: Orders) -> Bools:
        ledger, price = self.ledger, self.price
        turns = self.worlds.turns[ledger.world, ledger.tick]
        done = np.empty(turns.shape, dtype=np.bool_)
        for traders in turns.T:
            own = orders.of(self.rows, traders)
            done[self.rows, traders] = trade(ledger, self.rules, price, traders, own)
        return done

    def _end_tick(self) -> None:
        ledger, worlds = self.ledger, self.worlds
        ledger.tick += 1
        if worlds.perps:
            self._liquidate()
            self._fund(
                np.flatnonzero(
                    worlds.to_funding[ledger.world, ledger.tick] == perps.FUNDING_MINUTES
                )
            )
        over = self.over
        due = worlds.resolves_at[ledger.world] <= ledger.tick[:, None]
        self._resolve((due | over[:, None]) & ledger.open)
        self._close_all(np.flatnonzero(over))
        self._begin_tick(np.flatnonzero(~over))

    def _liquidate(self) -> None:
        """Close positions whose price has reached the limit; the exchange keeps the margin."""
        ledger = self.ledger
        left = perps.headroom(self.price[:, None, :, None], ledger.limit, SIGN)
        hit = np.nonzero(left <= perps.LIQUIDATED)
        if len(hit[0]):
            np.add.at(ledger.exchange, hit[0], ledger.margin[hit])
            ledger.clear_positions(hit)

    def _fund(self, rows: Ints) -> None:
        ledger = self.ledger
        rate = self.worlds.funding_rate[ledger.world[rows], None, :, None]
        due = perps.funding(ledger.size[rows], rate, SIGN).sum((2, 3))
        paid = np.minimum(due, ledger.balance[rows])
        ledger.balance[rows] -= paid
        ledger.exchange[rows] += paid.sum(1)

    def _resolve(self, due: Bools) -> None:
        """Close the markets of ``due`` [B, M]. A winning share pays $1."""
        row, market = np.nonzero(due)
        if not len(row):
            return
        ledger = self.ledger
        winners = ledger.shares[row, :, market, self.worlds.outcome[ledger.world[row], market]]
        np.add.at(ledger.balance, row, winners)
        np.add.at(ledger.exchange, row, ledger.pairs[row, market] - winners.sum(1))
        ledger.shares[row, :, market] = 0.0
        ledger.pairs[row, market] = 0.0
        ledger.open[row, market] = False

    def _close_all(self, rows: Ints) -> None:
        if not len(rows):
            return
        ledger = self.ledger
        profit = (ledger.profit(self.price) - ledger.size * self.rules.fee)[rows]
        ledger.balance[rows] += (ledger.margin[rows] + profit).sum((2, 3))
        ledger.exchange[rows] -= profit.sum((1, 2, 3))
        ledger.clear_positions(rows)

    def _begin_tick(self, rows: Ints) -> None:
        """Carry out the crowd's orders for the exchange."""
        ledger, worlds = self.ledger, self.worlds
        world, tick = ledger.world[rows], ledger.tick[rows]

        market = worlds.noise_market[world, tick]
        trades = np.flatnonzero(market >= 0)
        trades = trades[ledger.open[rows[trades], market[trades]]]
        side, dollars = worlds.noise_side[world, tick], worlds.noise_dollars[world, tick]
        rows, dollars = rows[trades], dollars[trades]
        ledger.exchange[rows] -= dollars
        mint(ledger, rows, market[trades], side[trades], dollars)


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
