"""A player's place in a market: what it sees, what it owns, and what that is worth."""

from typing import TYPE_CHECKING

from babylon.game.market.account import Account, Holding, Outcome, Position
from babylon.game.market.amm import Pool, Side
from babylon.game.market.perps import Direction
from babylon.game.market.scenario import Scenario

if TYPE_CHECKING:
    from babylon.game.market.market import Market


class Seat:
    """What players and scripted agents decide by; ground truth is in ``scenario``."""

    def __init__(self, market: "Market", account: Account) -> None:
        self.market = market
        self.account = account

    @property
    def scenario(self) -> Scenario:
        return self.market.scenario

    @property
    def tick(self) -> int:
        return self.market.tick

    @property
    def over(self) -> bool:
        return self.market.over

    @property
    def pools(self) -> dict[str, Pool]:
        """Of the questions that can be traded."""
        return self.market.predictions.pools

    @property
    def prices(self) -> dict[str, float]:
        """Of the perps, in dollars."""
        return self.market.futures.prices

    @property
    def balance(self) -> float:
        return self.account.balance

    @property
    def holdings(self) -> dict[tuple[str, Side], Holding]:
        return self.account.holdings

    @property
    def positions(self) -> dict[tuple[str, Direction], Position]:
        return self.account.positions

    @property
    def outcomes(self) -> list[Outcome]:
        return self.account.outcomes

    @property
    def equity(self) -> float:
        """Cash, what the shares would fetch if sold now, and what perps are worth; no fees."""
        return (
            self.balance
            + sum(
                self.pools[market].sell(side, holding.shares)[1]
                for (market, side), holding in self.holdings.items()
            )
            + sum(
                position.margin + position.pnl(self.market.futures.price(ticker))
                for (ticker, _), position in self.positions.items()
            )
        )

    @property
    def pnl(self) -> float:
        return self.equity - self.scenario.rules.start_balance

    def won(self, outcome: Outcome) -> bool | None:
        """Did a carried-out trade pay off? A sale or a close by what it made, shares bought by the
        truth of their question, a perp opened by the price at which the position ended. None for
        no trade, or while the position is open."""
        if not outcome.success:
            return None
        if outcome.realised_pnl is not None:
            return outcome.realised_pnl > 0
        if (fill := outcome.perp) is not None:
            end = fill.exit.price
            return None if end is None else fill.direction.sign * (end - fill.price) > 0
        if outcome.market_id is None:
            return None
        question = self.scenario.question(outcome.market_id)
        return question is not None and question.outcome is outcome.side
