"""Trading in the shares of prediction markets, by the formulas of ``amm``.

Every dollar paid in mints a pair of shares. ``pairs`` is the number of outstanding pairs of each
open market, which equals its collateral in dollars. Pool, players and crowd together hold that many
shares of each side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from babylon.game.market.account import Account, Holding, MarketExchange, Outcome, refused
from babylon.game.market.amm import INITIAL_RESERVE, Pool, Side
from babylon.game.market.orders import Order, OrderKind
from babylon.game.market.scenario import Question, Rules


@dataclass(slots=True)
class PredictionDesk:
    """The open prediction markets. The exchange pays for their first reserves."""

    rules: Rules
    exchange: MarketExchange
    pools: dict[str, Pool] = field(default_factory=dict)
    pairs: dict[str, float] = field(default_factory=dict)
    resolved: dict[str, Side] = field(default_factory=dict)

    def open(self, questions: Iterable[Question]) -> None:
        for question in questions:
            self.pools[question.market_id] = Pool()
            self.pairs[question.market_id] = INITIAL_RESERVE
            self.exchange.balance -= INITIAL_RESERVE

    @property
    def collateral(self) -> float:
        """Collateral of all open markets, in dollars."""
        return sum(self.pairs.values())

    def trade(self, account: Account, order: Order) -> Outcome:
        return (
            self._sell(account, order)
            if order.kind is OrderKind.SELL
            else self._buy(account, order)
        )

    def crowd(self, market_id: str, side: Side, dollars: float) -> None:
        """Carry out a background order for the exchange, without a fee, if the market is open."""
        if market_id in self.pools:
            self.exchange.balance -= dollars
            self._mint(market_id, side, dollars)

    def resolve(self, outcomes: Mapping[str, Side], accounts: Iterable[Account]) -> None:
        """Close markets. A winning share pays $1; the exchange receives the rest."""
        collateral = sum(self.pairs.pop(market) for market in outcomes)
        for account in accounts:
            for market, side in [key for key in account.holdings if key[0] in outcomes]:
                shares = account.holdings.pop((market, side)).shares
                if outcomes[market] is side:
                    account.balance += shares
                    collateral -= shares
        self.exchange.balance += collateral
        for market in outcomes:
            del self.pools[market]
        self.resolved.update(outcomes)

    def _buy(self, account: Account, order: Order) -> Outcome:
        side = Side.YES if order.kind is OrderKind.BUY_YES else Side.NO
        error = self._refusal(order)
        if error is None and order.amount > self.rules.max_order:
            error = f"amount {order.amount:g} is above the largest order {self.rules.max_order:g}"
        if error is None and order.amount > account.balance:
            error = f"amount {order.amount:g} is above the balance {account.balance:.2f}"
        if error is not None:
            return refused("BUY_SHARES", error)
        fee = order.amount * self.rules.fee
        shares = self._mint(order.market, side, order.amount - fee)
        account.balance -= order.amount
        self.exchange.balance += fee
        holding = account.holdings.setdefault((order.market, side), Holding())
        holding.shares += shares
        holding.cost += order.amount
        return Outcome(
            action_type="BUY_SHARES",
            success=True,
            market_id=order.market,
            side=side,
            shares=shares,
            dollars=order.amount,
        )

    def _sell(self, account: Account, order: Order) -> Outcome:
        """Sell ``amount`` shares of the larger position held in a market."""
        error = self._refusal(order)
        # A purchase of less than a rounding error buys no shares.
        held = [
            key
            for key, holding in account.holdings.items()
            if key[0] == order.market and holding.shares > 0
        ]
        if error is None and not held:
            error = f"no position in market {order.market!r} to sell"
        if error is not None:
            return refused("SELL_SHARES", error)
        # An order names no side, and an account may hold both.
        key = max(held, key=lambda key: account.holdings[key].shares)
        holding = account.holdings[key]
        shares = min(order.amount, holding.shares)
        self.pools[order.market], proceeds = self.pools[order.market].sell(key[1], shares)
        self.pairs[order.market] -= proceeds
        fee = proceeds * self.rules.fee
        dollars = proceeds - fee
        cost = holding.cost * shares / holding.shares
        account.balance += dollars
        self.exchange.balance += fee
        holding.shares -= shares
        holding.cost -= cost
        if holding.shares == 0:
            del account.holdings[key]
        return Outcome(
            action_type="SELL_SHARES",
            success=True,
            market_id=order.market,
            side=key[1],
            shares=shares,
            dollars=dollars,
            realised_pnl=dollars - cost,
        )

    def _mint(self, market_id: str, side: Side, dollars: float) -> float:
        self.pools[market_id], shares = self.pools[market_id].buy(side, dollars)
        self.pairs[market_id] += dollars
        return shares

    def _refusal(self, order: Order) -> str | None:
        if not (isfinite(order.amount) and order.amount > 0):
            return f"amount {order.amount:g} is not a positive number"
        if order.market in self.pools:
            return None
        if order.market in self.resolved:
            return f"market {order.market!r} is resolved: it was {self.resolved[order.market]}"
        choice = ", ".join(self.pools) or "none is open"
        return f"market {order.market!r} does not exist: choose one of {choice}"
