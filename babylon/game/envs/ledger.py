"""The state of B worlds with N traders each, as float64 arrays; money in dollars.

Axes: B worlds, N traders, M questions, P perps. A last axis of 2 is YES and NO of a question, or
long and short of a perp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from babylon.game.envs.worlds import Bools, Floats, Ints
from babylon.game.market import amm, perps
from babylon.game.market.amm import Side
from babylon.game.market.market import Market
from babylon.game.market.perps import Direction

SIGN = np.array([1.0, -1.0])  # long, short
NEVER = SIGN * -np.inf  # liquidation price of an empty position
Index = Ints | tuple[Ints, ...] | EllipsisType


@dataclass(slots=True)
class Ledger:
    """All state that changes during play. An empty position has size 0 and entry 1."""

    world: Ints  # [B] index of the scenario
    tick: Ints  # [B]
    reserves: Floats  # [B, M, 2] the pools' shares
    pairs: Floats  # [B, M] outstanding pairs, equal to the collateral
    open: Bools  # [B, M] False: resolved
    exchange: Floats  # [B]
    balance: Floats  # [B, N]
    shares: Floats  # [B, N, M, 2]
    size: Floats  # [B, N, P, 2]
    margin: Floats  # [B, N, P, 2]
    entry: Floats  # [B, N, P, 2]
    limit: Floats  # [B, N, P, 2] liquidation price

    def start(self, rows: Ints, worlds: Ints, start_balance: float) -> None:
        """Reset ``rows`` to the start of ``worlds``."""
        self.world[rows] = worlds
        self.tick[rows] = 0
        self.reserves[rows] = amm.INITIAL_RESERVE
        self.pairs[rows] = amm.INITIAL_RESERVE
        self.open[rows] = True
        self.exchange[rows] = -amm.INITIAL_RESERVE * self.open.shape[1]
        self.balance[rows] = start_balance
        self.shares[rows] = 0.0
        self.clear_positions(rows)

    def clear_positions(self, where: Index) -> None:
        """Set positions to empty."""
        self.size[where] = 0.0
        self.margin[where] = 0.0
        self.entry[where] = 1.0
        self.limit[where] = np.broadcast_to(NEVER, self.limit.shape)[where]

    def equity(self, price: Floats) -> Floats:
        """Return balance, sale value of the shares, and worth of the perps; before fees. [B, N]

        ``price`` [B, P] are the perps' prices.
        """
        own = self.reserves[:, None]
        _, _, dollars = amm.sell(own, own[..., ::-1], self.shares)
        held: Floats = np.where(self.shares > 0.0, dollars, 0.0).sum((2, 3))
        perps_worth: Floats = (self.margin + self.profit(price)).sum((2, 3))
        return self.balance + held + perps_worth

    def settled(self, outcome: Ints, price: Floats, fee: float) -> Floats:
        """Return the traders' worth if all that is open is held to the end; ground truth. [B, N]

        ``outcome`` [B, M] are the winning sides, ``price`` [B, P] the perps' last prices. A perp
        that will be liquidated counts at its last price until then.
        """
        won = np.take_along_axis(self.shares, outcome[:, None, :, None], 3)[..., 0].sum(-1)
        closed: Floats = (self.margin + self.profit(price) - self.size * fee).sum((2, 3))
        worth: Floats = self.balance + won + closed
        return worth

    def profit(self, price: Floats) -> Floats:
        """Return the P&L of every position in dollars. [B, N, P, 2]"""
        return perps.pnl(self.size, self.entry, price[:, None, :, None], SIGN)

    @property
    def total(self) -> Floats:
        """Return the dollars of traders, exchange and markets in each world. [B]"""
        cash: Floats = self.balance.sum(1) + self.margin.sum((1, 2, 3))
        collateral: Floats = self.pairs.sum(1)
        return cash + self.exchange + collateral


def blank(rows: int, traders: int, questions: int, perps_count: int) -> Ledger:
    """Return a ledger of ``rows`` rows, to be filled by ``start``."""
    position = (rows, traders, perps_count, 2)
    return Ledger(
        world=np.zeros(rows, dtype=np.int64),
        tick=np.zeros(rows, dtype=np.int64),
        reserves=np.zeros((rows, questions, 2)),
        pairs=np.zeros((rows, questions)),
        open=np.zeros((rows, questions), dtype=np.bool_),
        exchange=np.zeros(rows),
        balance=np.zeros((rows, traders)),
        shares=np.zeros((rows, traders, questions, 2)),
        size=np.zeros(position),
        margin=np.zeros(position),
        entry=np.zeros(position),
        limit=np.zeros(position),
    )


def ledger_of(market: Market, names: Sequence[str]) -> Ledger:
    """Return the scalar game's state as a ledger of one row with the named accounts.

    A resolved question has no pool; its reserves are the initial ones.
    """
    questions, listed = market.scenario.questions, market.scenario.perps
    ledger = blank(1, len(names), len(questions), len(listed))
    ledger.tick[0] = market.tick
    ledger.exchange[0] = market.exchange.balance
    ledger.reserves[:] = amm.INITIAL_RESERVE
    ledger.clear_positions(...)
    columns = {question.market_id: column for column, question in enumerate(questions)}
    for market_id, pool in market.predictions.pools.items():
        ledger.open[0, columns[market_id]] = True
        ledger.reserves[0, columns[market_id]] = pool.yes, pool.no
        ledger.pairs[0, columns[market_id]] = market.predictions.pairs[market_id]
    tickers = {perp.ticker: column for column, perp in enumerate(listed)}
    for trader, name in enumerate(names):
        account = market.accounts[name]
        ledger.balance[0, trader] = account.balance
        for (market_id, side), holding in account.holdings.items():
            which = 0 if side is Side.YES else 1
            ledger.shares[0, trader, columns[market_id], which] = holding.shares
        for (ticker, direction), position in account.positions.items():
            where = (0, trader, tickers[ticker], 0 if direction is Direction.LONG else 1)
            ledger.size[where], ledger.margin[where] = position.size, position.margin
            ledger.entry[where], ledger.limit[where] = position.entry, position.liquidation_price
    return ledger
