"""A trained agent's policy as a module that needs nothing of agilerl."""

import copy
from typing import Any

import numpy as np
import torch

from babylon.game.envs.actions import to_orders
from babylon.game.envs.coding import chosen
from babylon.game.envs.observation import observe
from babylon.game.envs.vector_core import Core
from babylon.game.envs.worlds import Floats, Worlds
from babylon.training.baselines.algorithms import Algorithm


class GreedyScores(torch.nn.Module):
    """Features [B, F] → scores of the menu's entries, or dials [B, A].

    Values of a critic, logits of a stochastic actor, the output of a deterministic one, or a
    bandit's estimate for each arm's context. The players take the best: nothing is sampled.
    """

    def __init__(self, agent: Any, algorithm: Algorithm) -> None:
        super().__init__()
        found = agent.actors if algorithm.view == "market" else agent.actor
        network = next(iter(found.values())) if algorithm.view == "market" else found
        self.network = copy.deepcopy(network).cpu().eval()
        self.stochastic = algorithm.agent in ("PPO", "IPPO")
        self.arms = int(agent.action_dim) if algorithm.view == "bandit" else 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.stochastic:
            logits: torch.Tensor = self.network.head_net.wrapped(
                self.network.extract_features(features)
            )
            return logits
        if not self.arms:
            output: torch.Tensor = self.network(features)
            return output
        rows, width = features.shape
        shared = features[:, None].expand(rows, self.arms, width)
        arms = torch.eye(self.arms).expand(rows, self.arms, self.arms)
        contexts = torch.cat([shared, arms], -1).reshape(rows * self.arms, width + self.arms)
        estimates: torch.Tensor = self.network(contexts).reshape(rows, self.arms)
        return estimates


def play_greedily(module: GreedyScores, algorithm: Algorithm, worlds: Worlds) -> Floats:
    """Play every world once → P&L in dollars [W]."""
    core = Core(worlds, worlds.count)
    core.start(core.rows, core.rows)
    sizes = worlds.questions, worlds.perps
    while not core.over.any():
        features = observe(core.ledger, worlds, core.equity)[:, 0]
        with torch.no_grad():
            scores = module(torch.from_numpy(np.ascontiguousarray(features))).numpy()
        actions = chosen(algorithm.coding, scores, *sizes)
        core.step(to_orders(actions[:, None], core.ledger, core.rules))
    pnl: Floats = core.equity[:, 0] - core.rules.start_balance
    return pnl
