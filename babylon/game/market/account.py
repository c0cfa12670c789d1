"""What a player owns, and what became of each of its decisions."""

from dataclasses import dataclass, field

from babylon.game.market.amm import Side
from babylon.game.market.perps import Direction, liquidation_price, pnl


@dataclass(slots=True)
class Exchange:
    """The other side of every trade: it seeds the pools, trades for the crowd, is the counterparty
    of perps, and earns fees, funding and liquidations. Its balance may be negative."""

    balance: float = 0.0


@dataclass(slots=True)
class Holding:
    """Shares of one side of one market and the dollars paid for them, fees included."""

    shares: float = 0.0
    cost: float = 0.0


@dataclass(slots=True)
class Exit:
    """How a perp position ended; shared by all orders that built it."""

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
    """A perp order that was carried out at ``price``. Of an opening, ``exit`` tells the end of the
    position once it has come; of a closing, ``entry`` is what it was opened at."""

    ticker: str
    direction: Direction
    size: float
    leverage: float
    entry: float
    price: float
    fee: float
    exit: Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the game answers to a decision; ``error`` says why it was refused."""

    action_type: str
    success: bool
    error: str | None = None
    market_id: str | None = None  # of a trade in shares
    side: Side | None = None
    shares: float = 0.0
    dollars: float = 0.0
    perp: PerpFill | None = None
    realised_pnl: float | None = None  # of a sale, and of a perp position that was closed
    post_id: str | None = None  # what was written, or commented on
    content: str | None = None


@dataclass(slots=True)
class Account:
    """One player's money (dollars), holdings, perp positions and history."""

    name: str
    balance: float
    holdings: dict[tuple[str, Side], Holding] = field(default_factory=dict)
    positions: dict[tuple[str, Direction], Position] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def cash(self) -> float:
        """The balance and the margins paid in."""
        return self.balance + sum(position.margin for position in self.positions.values())


def refused(action_type: str, error: str) -> Outcome:
    return Outcome(action_type=action_type, success=False, error=error)
