"""The task of the programs here: buy the stock that is asked for. The right tool call earns 1.

The frameworks call the policy; this module sends what happened as events of play (docs/play.md).
"""

import argparse
import json
import os
import random
import urllib.request
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
    shares: int
    agent: str
    trajectory: str = field(default_factory=lambda: f"order-{uuid.uuid4()}")
    bought: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"Buy {self.shares} shares of {self.ticker}."

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each call: the order is the trajectory, and its calls are its first step."""
        names = {"agent": self.agent, "trajectory": self.trajectory, "step": "0"}
        return {f"x-babylon-{name}": value for name, value in names.items()}

    @property
    def reward(self) -> float:
        """1 if the first purchase is the right one."""
        return float(self.bought[:1] == [self.ticker])

    def buy(self, ticker: str) -> str:
        """Buy the shares of a stock.

        Args:
            ticker: the stock's ticker, NVDA or TSLA.
        """
        self.bought.append(ticker)
        return f"Bought {ticker}."

    def events(self, at: str | None) -> list[dict[str, object]]:
        """Return the events of a finished order: its start, its one step, and its reward.

        Orders for the same number of shares are compared with each other.
        """
        action = {
            "action_type": "BUY" if self.bought else "RESPONSE",
            "success": self.reward > 0,
            "parameters": {"tickers": self.bought},
        }
        events: list[dict[str, object]] = [
            {"type": "start", "agent_id": self.agent, "scenario_id": f"{self.shares} shares"},
            {"type": "step", "number": 0, "action": action},
            {"type": "finish", "reward": self.reward},
        ]
        when = {} if at is None else {"at": at}
        return [{**event, "trajectory_id": self.trajectory, **when} for event in events]


def send(events: list[dict[str, object]]) -> None:
    """Send events to the gateway that the framework calls, with the same key."""
    openai, anthropic = (os.environ.get(f"{name}_BASE_URL") for name in ("OPENAI", "ANTHROPIC"))
    key = os.environ["OPENAI_API_KEY" if openai else "ANTHROPIC_API_KEY"]
    request = urllib.request.Request(
        f"{openai or f'{anthropic}/v1'}/events",
        json.dumps({"events": events}).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # raises if an event is refused
        answer.read()


def run(agent: str, play: Callable[[Order], None]) -> None:
    """Play orders, send what happened, and print a line of JSON for each: trajectory and reward."""
    options = argparse.ArgumentParser()
    options.add_argument("--orders", type=int, default=3)
    options.add_argument("--tickers", nargs="+", default=["NVDA", "TSLA"])
    options.add_argument("--shares", nargs="+", type=int, default=[1, 2, 3])
    options.add_argument("--agents", type=int, default=1, help="number of agents that take turns")
    options.add_argument("--at", help="time of the play, in a window that is over; default: now")
    asked = options.parse_args()
    for number in range(asked.orders):
        turn, place = divmod(number, len(asked.shares))
        player = agent if asked.agents == 1 else f"{agent}-{turn % asked.agents}"
        order = Order(random.choice(asked.tickers), asked.shares[place], player)
        play(order)
        send(order.events(asked.at))
        print(json.dumps({"trajectory": order.trajectory, "reward": order.reward}), flush=True)
