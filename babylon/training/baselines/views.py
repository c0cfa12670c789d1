"""The game as agilerl's trainers take it, with coded actions and payoffs as rewards.

A reward is the change of what the account is worth at the settlement (``TraderVectorEnv``): each
order is rewarded at once with its payoff, as ``CREDIT=decision`` does for LLMs.
"""

from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import TransformAction
from numpy.typing import NDArray
from pettingzoo.utils.wrappers import BaseParallelWrapper

from babylon.core.numeric_manifest import Coding
from babylon.game.envs.coding import code_space, decode
from babylon.game.envs.observation import BOUND, Observation
from babylon.game.envs.shared import MarketEnv
from babylon.game.envs.vector import TraderVectorEnv
from babylon.game.market.scenario import PRESETS
from babylon.training.baselines.algorithms import ENVS, TRADERS, Algorithm


def make_view(algorithm: Algorithm, rules: str, seed: int) -> Any:
    """Return the environment of an algorithm, seeded."""
    env: Any
    if algorithm.view == "market":
        env = SharedMarket(rules, algorithm.coding)
    elif algorithm.view == "bandit":
        return TraderBandit(rules, seed)
    else:
        env = _coded(TraderVectorEnv(ENVS, rules, payoff=True), rules, algorithm.coding)
    env.reset(seed=seed)
    return env


def spaces_of(env: Any) -> tuple[Any, Any]:
    """Return (observation space, action space) of one trader, or of each by order."""
    if isinstance(env, SharedMarket):
        names = env.possible_agents
        return [env.observation_space(n) for n in names], [env.action_space(n) for n in names]
    return env.single_observation_space, env.single_action_space


def _coded(env: TraderVectorEnv, rules: str, coding: Coding) -> VectorEnv[Any, Any, Any]:
    sizes = PRESETS[rules].markets, PRESETS[rules].perps
    decoded = partial(_decoded, coding, sizes)
    return TransformAction(env, decoded, single_action_space=code_space(coding, *sizes))


def _decoded(coding: Coding, sizes: tuple[int, int], codes: NDArray[Any]) -> NDArray[np.int64]:
    return decode(coding, np.asarray(codes), *sizes)


class SharedMarket(BaseParallelWrapper):  # type: ignore[misc]  # pettingzoo is not typed
    """Traders in one market, whose actions are codes."""

    def __init__(self, rules: str, coding: Coding) -> None:
        super().__init__(MarketEnv(TRADERS, rules, payoff=True))
        self._coding, self._sizes = coding, (PRESETS[rules].markets, PRESETS[rules].perps)
        space = code_space(coding, *self._sizes)
        self._spaces = {name: space for name in self.possible_agents}

    def action_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent]

    def step(self, actions: dict[str, Any]) -> Any:
        return super().step(
            {n: _decoded(self._coding, self._sizes, code) for n, code in actions.items()}
        )


class TraderBandit:
    """One trader's ticks as rounds of a contextual bandit, in agilerl's form.

    The arms are the menu's entries. An arm's context is the observation and the arm's one-hot, so
    arms share what they learn. A payoff is what a round's arm earns, whatever follows.
    """

    num_envs = 1

    def __init__(self, rules: str, seed: int) -> None:
        self._env = _coded(TraderVectorEnv(1, rules, payoff=True), rules, "menu")
        self._env.reset(seed=seed)
        self.single_action_space = self._env.single_action_space
        assert isinstance(self.single_action_space, Discrete)
        self.arms = int(self.single_action_space.n)
        width = int(np.prod(self._env.single_observation_space.shape or ())) + self.arms
        self.single_observation_space = Box(-BOUND, BOUND, (width,), np.float32)

    def reset(self) -> Observation:
        """Begin a play → the arms' contexts [arms, features + arms]."""
        return self._contexts(self._env.reset()[0])

    def step(self, arm: int) -> tuple[Observation, float]:
        """Play one tick → the next contexts, the payoff."""
        observation, reward, *_ = self._env.step(np.array([arm]))
        return self._contexts(observation), float(reward[0])

    def close(self) -> None:
        """Agilerl closes what it has trained on."""

    def _contexts(self, observation: Observation) -> Observation:
        shared = np.repeat(observation, self.arms, axis=0)
        return np.concatenate([shared, np.eye(self.arms, dtype=np.float32)], axis=1)
