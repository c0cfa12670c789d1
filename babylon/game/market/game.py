"""One agent's play of one scenario.

Every agent plays its own copy of the world, with the same crowd and the same opponents. Agents of
a scenario differ only in their decisions, which is what a GRPO group compares. In shared markets
(PettingZoo, shared fleets) each agent has a ``Seat`` instead.
"""

from babylon.game.market.account import Outcome
from babylon.game.market.market import Market, Seat
from babylon.game.market.orders import Decision
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS


def make_market(scenario: Scenario) -> Market:
    """Make the market of a scenario, with the opponents that its rules name.

    Raises:
        ValueError: An opponent is not a scripted agent.
    """
    unknown = [name for name in scenario.rules.opponents if name not in SCRIPTED_AGENTS]
    if unknown:
        raise ValueError(
            f"opponents {', '.join(unknown)} are unknown: choose from {', '.join(SCRIPTED_AGENTS)}"
        )
    return Market(scenario, [SCRIPTED_AGENTS[name] for name in scenario.rules.opponents])


class Game(Seat):
    """The only seat in a market of its own."""

    def __init__(self, scenario: Scenario, name: str = "player") -> None:
        market = make_market(scenario)
        super().__init__(market, market.join(name).account)

    def act(self, decision: Decision) -> Outcome:
        """Carry out one decision and begin the next tick. A refused decision has no effect."""
        return self.market.step({self.account.name: decision})[self.account.name]

    def settle(self) -> float:
        """Resolve all questions, close all positions and return the final P&L in dollars."""
        self.market.settle()
        return self.pnl
