"""The task of the programs here: buy the stock that is asked for. The right tool call earns 1."""

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

MODEL = "babylon"
INSTRUCTIONS = "You trade stocks. Buy what you are asked for with the tool, then say that you did."
TURNS = 4  # at most, of one order


@dataclass
class Order:
    """One order: a trajectory of calls, which its headers name."""

    ticker: str
    agent: str
    trajectory: str = field(default_factory=lambda: f"order-{uuid.uuid4()}")
    bought: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"Buy {self.ticker}."

    @property
    def headers(self) -> dict[str, str]:
        return {"x-babylon-agent": self.agent, "x-babylon-trajectory": self.trajectory}

    @property
    def reward(self) -> float:
        """1 if the first purchase is the right one."""
        return float(self.bought[:1] == [self.ticker])

    def buy(self, ticker: str) -> str:
        """Buy one share of a stock.

        Args:
            ticker: the stock's ticker, NVDA or TSLA.
        """
        self.bought.append(ticker)
        return f"Bought {ticker}."


def run(agent: str, play: Callable[[Order], None], orders: int = 3) -> None:
    """Play orders, and print a line of JSON for each: its trajectory and its reward."""
    for _ in range(orders):
        order = Order(random.choice(("NVDA", "TSLA")), agent)
        play(order)
        print(json.dumps({"trajectory": order.trajectory, "reward": order.reward}), flush=True)
