"""The game in B worlds at once with N traders each: the vectorised version of ``market.Market``.

It uses the same formulas and the same order of events as the scalar game. A test compares every
balance, pool, position and reward of both. The feed moves no money and is left out; scripted
opponents are not supported.
"""

import numpy as np

from babylon.game.envs import desks
from babylon.game.envs.desks import Orders
from babylon.game.envs.ledger import SIGN, Ledger, blank
from babylon.game.envs.worlds import Bools, Floats, Ints, Worlds
from babylon.game.market import perps


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
            done[self.rows, traders] = desks.trade(ledger, self.rules, price, traders, own)
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
        hit = np.nonzero(SIGN * (self.price[:, None, :, None] - ledger.limit) <= 0.0)
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
        desks.mint(ledger, rows, market[trades], side[trades], dollars)
