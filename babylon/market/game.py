"""One agent's play of one scenario: observe, order, settle.

First version of the game: every agent trades against its own copy of the scenario's pools, moved
by the same background orders. Agents of a scenario therefore face the same world and differ by
their decisions alone, which is what a GRPO group compares.
"""

from dataclasses import dataclass, field

from babylon.market.amm import Pool, Side
from babylon.market.orders import Decision, Hold, Order, OrderKind
from babylon.market.scenario import Scenario


@dataclass(slots=True)
class Holding:
    """Shares of one side of one market and the dollars paid for them, fees included."""

    shares: float = 0.0
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the game answers to a decision; ``error`` says why it was refused."""

    action_type: str
    success: bool
    error: str | None = None
    market_id: str | None = None
    side: Side | None = None
    shares: float = 0.0
    dollars: float = 0.0
    realised_pnl: float | None = None  # of a sale


@dataclass(slots=True)
class Game:
    """The state of one agent's play. ``act`` takes one decision a tick, ``settle`` ends it."""

    scenario: Scenario
    balance: float = 0.0
    tick: int = 0
    pools: dict[str, Pool] = field(default_factory=dict)
    holdings: dict[tuple[str, Side], Holding] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balance = self.scenario.rules.start_balance
        self.pools = {question.market_id: Pool() for question in self.scenario.questions}
        self._background_order()

    @property
    def over(self) -> bool:
        return self.tick >= self.scenario.rules.ticks

    @property
    def equity(self) -> float:
        """Cash plus what the open positions would fetch if sold now, in dollars."""
        return self.balance + sum(
            self.pools[market].sell(side, holding.shares)[1]
            for (market, side), holding in self.holdings.items()
        )

    @property
    def pnl(self) -> float:
        return self.equity - self.scenario.rules.start_balance

    def act(self, decision: Decision) -> Outcome:
        """Carry out one decision and move on to the next tick. A refused one costs the tick."""
        match decision:
            case Hold(error=error):
                outcome = Outcome(
                    action_type="HOLD" if error is None else "TRADING_DECISION",
                    success=error is None,
                    error=error,
                )
            case Order(kind=OrderKind.SELL):
                outcome = self._sell(decision)
            case Order():
                outcome = self._buy(decision)
        self.outcomes.append(outcome)
        self.tick += 1
        if not self.over:
            self._background_order()
        return outcome

    def settle(self) -> float:
        """Resolve every question: winning shares pay $1. Returns the final P&L in dollars."""
        for (market, side), holding in self.holdings.items():
            question = self.scenario.question(market)
            if question is not None and question.outcome is side:
                self.balance += holding.shares
        self.holdings.clear()
        return self.balance - self.scenario.rules.start_balance

    def won(self, outcome: Outcome) -> bool | None:
        """Did a carried-out trade make money, by the truth of its question? None for no trade."""
        if not outcome.success or outcome.market_id is None:
            return None
        if outcome.realised_pnl is not None:
            return outcome.realised_pnl > 0
        question = self.scenario.question(outcome.market_id)
        return question is not None and question.outcome is outcome.side

    def _buy(self, order: Order) -> Outcome:
        side = Side.YES if order.kind is OrderKind.BUY_YES else Side.NO
        rules = self.scenario.rules
        error = self._refusal(order)
        if error is None and order.amount > rules.max_order:
            error = f"amount {order.amount:g} is above the largest order {rules.max_order:g}"
        if error is None and order.amount > self.balance:
            error = f"amount {order.amount:g} is above the balance {self.balance:.2f}"
        if error is not None:
            return Outcome(action_type="BUY_SHARES", success=False, error=error)
        fee = order.amount * rules.fee
        self.pools[order.market], shares = self.pools[order.market].buy(side, order.amount - fee)
        self.balance -= order.amount
        holding = self.holdings.setdefault((order.market, side), Holding())
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

    def _sell(self, order: Order) -> Outcome:
        """Sell ``amount`` shares of the larger position held in a market."""
        error = self._refusal(order)
        held = [key for key in self.holdings if key[0] == order.market]
        if error is None and not held:
            error = f"no position in market {order.market!r} to sell"
        if error is not None:
            return Outcome(action_type="SELL_SHARES", success=False, error=error)
        key = max(held, key=lambda key: self.holdings[key].shares)
        holding = self.holdings[key]
        shares = min(order.amount, holding.shares)
        self.pools[order.market], dollars = self.pools[order.market].sell(key[1], shares)
        dollars -= dollars * self.scenario.rules.fee
        cost = holding.cost * shares / holding.shares
        self.balance += dollars
        holding.shares -= shares
        holding.cost -= cost
        if holding.shares == 0:
            del self.holdings[key]
        return Outcome(
            action_type="SELL_SHARES",
            success=True,
            market_id=order.market,
            side=key[1],
            shares=shares,
            dollars=dollars,
            realised_pnl=dollars - cost,
        )

    def _refusal(self, order: Order) -> str | None:
        if order.market not in self.pools:
            return f"market {order.market!r} does not exist: choose one of {', '.join(self.pools)}"
        return None

    def _background_order(self) -> None:
        order = self.scenario.noise[self.tick]
        self.pools[order.market_id], _ = self.pools[order.market_id].buy(order.side, order.dollars)
