"""One agent's play of one scenario: observe, decide, settle.

Every agent plays its own copy of the world, moved by the same crowd and, where the rules have
them, the same opponents. Agents of a scenario therefore face the same world and differ by their
decisions alone, which is what a GRPO group compares. Where agents share one ``Market`` (PettingZoo,
shared fleets), each has a ``Seat`` in it.
"""

from babylon.game.market.account import Outcome
from babylon.game.market.market import Market
from babylon.game.market.orders import Decision
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.game.market.seat import Seat


def make_market(scenario: Scenario) -> Market:
    """The market of a scenario, with the opponents that its rules name.

    Raises:
        ValueError: there is no scripted agent of a name.
    """
    unknown = [name for name in scenario.rules.opponents if name not in SCRIPTED_AGENTS]
    if unknown:
        raise ValueError(
            f"opponents {', '.join(unknown)} are unknown: choose from {', '.join(SCRIPTED_AGENTS)}"
        )
    return Market(scenario, [SCRIPTED_AGENTS[name] for name in scenario.rules.opponents])


class Game(Seat):
    """A market of one's own. ``act`` takes one decision a tick, ``settle`` ends the play."""

    def __init__(self, scenario: Scenario, name: str = "player") -> None:
        market = make_market(scenario)
        super().__init__(market, market.join(name).account)

    def act(self, decision: Decision) -> Outcome:
        """Carry out one decision and move on to the next tick. A refused one costs the tick."""
        return self.market.step({self.account.name: decision})[self.account.name]

    def settle(self) -> float:
        """Resolve every question, close every position. Returns the final P&L in dollars."""
        self.market.settle()
        return self.pnl
