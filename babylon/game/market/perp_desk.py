"""Trading in perpetual futures against the exchange, by the formulas of ``perps``."""

from collections.abc import Iterable
from dataclasses import dataclass

from babylon.game.market.account import (
    Account,
    Exit,
    MarketExchange,
    Outcome,
    PerpFill,
    Position,
    refused,
)
from babylon.game.market.orders import Order, OrderKind
from babylon.game.market.perps import (
    LIQUIDATED,
    MAX_LEVERAGE,
    MIN_SIZE,
    Direction,
    funding,
    headroom,
    joint_entry,
)
from babylon.game.market.scenario import Perp, Rules

OPENED, CLOSED = "OPEN_PERP_POSITION", "CLOSE_PERP_POSITION"
DIRECTIONS = {OrderKind.OPEN_LONG: Direction.LONG, OrderKind.OPEN_SHORT: Direction.SHORT}


@dataclass(slots=True)
class PerpDesk:
    """The listed perps and their prices at ``tick``."""

    rules: Rules
    exchange: MarketExchange
    perps: dict[str, Perp]
    tick: int = 0

    def price(self, ticker: str) -> float:
        return self.perps[ticker].prices[self.tick]

    @property
    def prices(self) -> dict[str, float]:
        return {ticker: self.price(ticker) for ticker in self.perps}

    def trade(self, account: Account, order: Order) -> Outcome:
        action = CLOSED if order.kind is OrderKind.CLOSE else OPENED
        if order.market not in self.perps:
            choice = ", ".join(self.perps) or "none is listed"
            return refused(action, f"perp {order.market!r} does not exist: choose one of {choice}")
        if order.kind is OrderKind.CLOSE:
            return self._close(account, order.market)
        return self._open(account, order, DIRECTIONS[order.kind])

    def move(self, tick: int, accounts: Iterable[Account]) -> None:
        """Move to the prices of a tick and liquidate positions.

        A liquidated position ends at its liquidation price. The exchange keeps the whole margin.
        """
        self.tick = tick
        for account in accounts:
            for (ticker, direction), position in [*account.positions.items()]:
                limit = position.liquidation_price
                if headroom(self.price(ticker), limit, direction.sign) <= LIQUIDATED:
                    del account.positions[ticker, direction]
                    self.exchange.balance += position.margin
                    position.exit.price, position.exit.liquidated = limit, True

    def fund(self, accounts: Iterable[Account]) -> None:
        """Settle the funding of all open positions. An account pays at most its balance."""
        for account in accounts:
            due = sum(
                funding(position.size, self.perps[ticker].funding_rate, direction.sign)
                for (ticker, direction), position in account.positions.items()
            )
            paid = min(due, account.balance)
            account.balance -= paid
            self.exchange.balance += paid

    def close_all(self, accounts: Iterable[Account]) -> None:
        """Close all positions at the current prices and charge the fees."""
        for account in accounts:
            for ticker, direction in [*account.positions]:
                self._end(account, ticker, direction)

    def _open(self, account: Account, order: Order, direction: Direction) -> Outcome:
        size, leverage = order.amount, order.leverage
        if not 1.0 <= leverage <= MAX_LEVERAGE:
            return refused(OPENED, f"leverage {leverage:g} is not between 1 and {MAX_LEVERAGE:g}")
        if not size >= MIN_SIZE:  # also true of NaN
            return refused(OPENED, f"amount {size:g} is below the smallest size {MIN_SIZE:g}")
        margin, fee = size / leverage, size * self.rules.fee
        for limit, name in (
            (self.rules.max_order, f"the largest order {self.rules.max_order:g}"),
            (account.balance, f"the balance {account.balance:.2f}"),
        ):
            if margin + fee > limit:
                return refused(OPENED, f"margin and fee {margin + fee:.2f} are above {name}")
        price, before = self.price(order.market), self._held(account, order.market)
        account.balance -= margin + fee
        self.exchange.balance += fee
        held = (order.market, direction)
        if position := account.positions.get(held):
            position.entry = joint_entry(position.size, position.entry, size, price)
            position.size += size
            position.margin += margin
        else:
            position = account.positions[held] = Position(direction, size, margin, price)
        return Outcome(
            action_type=OPENED,
            success=True,
            perp=PerpFill(
                ticker=order.market,
                direction=direction,
                size=size,
                leverage=leverage,
                entry=price,
                price=price,
                fee=fee,
                payoff=self._held(account, order.market) - before - fee,
                exit=position.exit,
            ),
        )

    def _close(self, account: Account, ticker: str) -> Outcome:
        """Close a perp's long and short position. The outcome describes the larger one."""
        held = {d: p for (name, d), p in account.positions.items() if name == ticker}
        if not held:
            return refused(CLOSED, f"no position in perp {ticker!r} to close")
        larger = max(held.values(), key=lambda position: position.size)
        before = self._held(account, ticker)
        realised = sum(self._end(account, ticker, direction) for direction in held)
        size = sum(position.size for position in held.values())
        return Outcome(
            action_type=CLOSED,
            success=True,
            realised_pnl=realised,
            perp=PerpFill(
                ticker=ticker,
                direction=larger.direction,
                size=size,
                leverage=larger.leverage,
                entry=larger.entry,
                price=self.price(ticker),
                fee=size * self.rules.fee,
                payoff=realised - before,
                exit=Exit(self.price(ticker)),
            ),
        )

    def _held(self, account: Account, ticker: str) -> float:
        """Return the P&L of an account's positions in a perp if they are held to the end.

        It knows the prices to come, so it is ground truth. Funding is left out.
        """
        ahead = self.perps[ticker].prices[self.tick + 1 :]
        total = 0.0
        for direction in Direction:
            if position := account.positions.get((ticker, direction)):
                worst = min(ahead) if direction is Direction.LONG else max(ahead)
                left = headroom(worst, position.liquidation_price, direction.sign)
                fee = position.size * self.rules.fee
                held = position.pnl(ahead[-1]) - fee
                total += -position.margin if left <= LIQUIDATED else held
        return total

    def _end(self, account: Account, ticker: str, direction: Direction) -> float:
        """Close one position at the current price and return its P&L after the closing fee."""
        position = account.positions.pop((ticker, direction))
        price = self.price(ticker)
        profit = position.pnl(price) - position.size * self.rules.fee
        account.balance += position.margin + profit
        self.exchange.balance -= profit
        position.exit.price = price
        return profit
