"""``pettingzoo.ParallelEnv``: several traders in one market, who move each other's prices.

All traders decide on the same state. Their decisions are carried out in a seeded random order.
Spaces, rewards and ends are those of ``TraderEnv``.
"""

import numpy as np
from gymnasium.spaces import MultiDiscrete, Space
from gymnasium.utils.seeding import np_random
from pettingzoo import ParallelEnv

from babylon.game.envs.actions import Action, action_space, to_decision, to_orders
from babylon.game.envs.ledger import ledger_of
from babylon.game.envs.observation import Observation, observation_space, observe
from babylon.game.envs.trader import REWARD_USD, Info, choose_scenario, outcome_info, rules_of
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.game import make_market
from babylon.game.market.prompts import names_of, render_observation
from babylon.game.market.scenario import Rules

Infos = dict[str, Info]


class MarketEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo is not typed
    """A market of ``traders`` under ``rules``, a preset's name or ``Rules``.

    ``payoff`` changes the reward as in ``TraderVectorEnv``.
    """

    metadata: Info = {"render_modes": ["ansi"], "name": "babylon_market_v0"}  # noqa: RUF012

    def __init__(
        self,
        traders: int = 4,
        rules: Rules | str = "hour",
        render_mode: str | None = None,
        payoff: bool = False,
    ) -> None:
        self.rules = rules_of(rules)
        self._payoff = payoff
        self.render_mode = render_mode
        self.possible_agents = [f"trader_{number}" for number in range(traders)]
        self.agents: list[str] = []
        sizes = self.rules.markets, self.rules.perps
        names = self.possible_agents
        self._observation_spaces = {name: observation_space(*sizes) for name in names}
        self._action_spaces = {name: action_space(*sizes) for name in names}
        self._random, _ = np_random()

    def observation_space(self, agent: str) -> Space[Observation]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> MultiDiscrete:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: Info | None = None
    ) -> tuple[dict[str, Observation], Infos]:
        """Begin a play → observations, infos."""
        if seed is not None:
            self._random, _ = np_random(seed)
        scenario = choose_scenario(self._random, self.rules, options)
        self.agents = [*self.possible_agents]
        self.market = make_market(scenario)
        self.seats = {name: self.market.join(name) for name in self.agents}
        self._worlds = from_scenarios([scenario], len(self.agents))
        observations = self._observe()
        self._worth = self._worths()
        return observations, {name: {"scenario_id": scenario.scenario_id} for name in self.agents}

    def step(
        self, actions: dict[str, Action]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], Infos]:
        """Play one tick.

        Raises:
            ValueError: An active trader has no action, or no play is on.
        """
        self._check_acting(actions)
        names, market = self.agents, self.market
        chosen = np.stack([actions[name] for name in names])[None]
        orders = to_orders(chosen, self._ledger, self.market.rules)
        decisions = {
            name: to_decision(orders, number, market.scenario) for number, name in enumerate(names)
        }
        outcomes = market.step(decisions)
        if market.over:
            market.settle()
            self.agents = []
        observations = self._observe()
        before, self._worth = self._worth, self._worths()
        return (
            observations,
            {name: (self._worth[name] - before[name]) / REWARD_USD for name in names},
            dict.fromkeys(names, market.over),
            dict.fromkeys(names, False),
            {n: {"pnl": self.seats[n].pnl, **outcome_info(outcomes[n])} for n in names},
        )

    def _check_acting(self, actions: dict[str, Action]) -> None:
        if not self.agents:
            raise ValueError("no play is on, so nobody can act: call reset() first")
        missing = [name for name in self.agents if name not in actions]
        if missing:
            raise ValueError(f"no action for {', '.join(missing)}: every trader acts in every tick")

    def render(self) -> str | None:
        """Return the prompts of LLM agents in the traders' places, under names of a fleet."""
        if self.render_mode != "ansi":
            return None
        names = names_of(self.market.scenario, len(self.agents))
        seats = [self.seats[agent] for agent in self.agents]
        chats = [render_observation(*each) for each in zip(seats, names, strict=True)]
        return "\n\n".join(m["content"] for chat in chats for m in chat) or "It is over."

    def _worths(self) -> dict[str, float]:
        """Return what each trader's reward is the change of, in dollars."""
        if not self._payoff:
            return {name: seat.equity for name, seat in self.seats.items()}
        worlds, fee = self._worlds, self.market.rules.fee
        worth = self._ledger.settled(worlds.outcome, worlds.price[:, -1], fee)[0]
        return dict(zip(self.possible_agents, worth.tolist(), strict=True))

    def _observe(self) -> dict[str, Observation]:
        names = self.possible_agents
        self._ledger = ledger_of(self.market, names)
        equity = np.array([[self.seats[name].equity for name in names]])
        observations = observe(self._ledger, self._worlds, equity)[0]
        return dict(zip(names, observations, strict=True))
