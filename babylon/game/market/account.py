"""A player's account: money, holdings, perp positions and the outcomes of its decisions."""

from dataclasses import dataclass, field

from babylon.game.market.amm import Side
from babylon.game.market.perps import Direction, liquidation_price, pnl


@dataclass(slots=True)
class MarketExchange:
    """The counterparty of every trade.

    It seeds the pools, trades for the crowd, takes the other side of perps, and receives fees,
    funding and liquidated margins. Its balance may be negative.
    """

    balance: float = 0.0


@dataclass(slots=True)
class Holding:
    """Shares of one side of one market, and the dollars paid for them including fees."""

    shares: float = 0.0
    cost: float = 0.0


@dataclass(slots=True)
class Exit:
    """The end of a perp position, shared by the fills of all orders that built it."""

    price: float | None = None  # None while it is open
    liquidated: bool = False


@dataclass(slots=True)
class Position:
    """An open perp position of one ticker and direction; money in dollars."""

    direction: Direction
    size: float
    margin: float
    entry: float
    exit: Exit = field(default_factory=Exit)

    @property
    def leverage(self) -> float:
        return self.size / self.margin

    @property
    def liquidation_price(self) -> float:
        return liquidation_price(self.entry, self.leverage, self.direction.sign)

    def pnl(self, price: float) -> float:
        return pnl(self.size, self.entry, price, self.direction.sign)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerpFill:
    """A perp order carried out at ``price``.

    After an opening, ``exit`` is filled in when the position ends. After a closing, ``entry`` is
    the price at which the position was opened. ``payoff`` is ground truth: the dollars that the
    order adds to the P&L at the end, if everything that is open is held until then.
    """

    ticker: str
    direction: Direction
    size: float
    leverage: float
    entry: float
    price: float
    fee: float
    payoff: float
    exit: Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a decision; ``error`` is the reason of a refusal."""

    action_type: str
    success: bool
    error: str | None = None
    market_id: str | None = None  # of a trade in a prediction market
    side: Side | None = None
    shares: float = 0.0
    dollars: float = 0.0
    perp: PerpFill | None = None
    realised_pnl: float | None = None  # of a sale or a closed perp position
    post_id: str | None = None  # the new post, or the post commented on
    content: str | None = None


@dataclass(slots=True)
class Account:
    """A player's balance in dollars, holdings, perp positions and history of outcomes.

    ``opening``: the balance with which it began, from which the P&L counts.
    """

    name: str
    balance: float
    opening: float = field(init=False)
    holdings: dict[tuple[str, Side], Holding] = field(default_factory=dict)
    positions: dict[tuple[str, Direction], Position] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opening = self.balance

    @property
    def cash(self) -> float:
        """Balance plus the margins of open positions, in dollars."""
        return self.balance + sum(position.margin for position in self.positions.values())


def refused(action_type: str, error: str) -> Outcome:
    return Outcome(action_type=action_type, success=False, error=error)
