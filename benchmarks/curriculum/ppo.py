"""PPO on the Gymnasium view of a level, from scratch: features in, discrete orders out.

The clipped objective of Schulman et al. 2017 (arXiv 1707.06347) with generalised advantages
(arXiv 1506.02438). An agent sees the features of ``babylon.game.envs``, not the words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from babylon.game.envs import TraderVectorEnv
from babylon.game.envs.actions import action_space
from babylon.game.envs.observation import feature_names
from babylon.game.envs.trader import REWARD_USD
from babylon.game.market.scenario import Rules, Scenario

ENVS, WIDTH, EPOCHS, BATCHES = 64, 64, 4, 8
RATE, CLIP, GAMMA, LAMBDA, ENTROPY = 3e-4, 0.2, 1.0, 0.95, 0.01


class Trader(nn.Module):
    """A policy with one head for each part of an action, and a value."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.parts = [int(choices) for choices in action_space(rules.markets, rules.perps).nvec]
        features = len(feature_names(rules.markets, rules.perps))

        def body(outputs: int) -> nn.Sequential:
            inner = nn.Linear(features, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
            return nn.Sequential(*inner, nn.Linear(WIDTH, outputs))

        self.policy, self.value = body(sum(self.parts)), body(1)

    def heads(self, seen: Tensor) -> list[Tensor]:
        """Log-probabilities of each part's choices ``[N, choices]``; features are cut to ±10."""
        logits: Tensor = self.policy(seen.clamp(-10, 10))
        return [part.log_softmax(-1) for part in torch.split(logits, self.parts, -1)]

    def worth(self, seen: Tensor) -> Tensor:
        values: Tensor = self.value(seen.clamp(-10, 10))
        return values.squeeze(-1)

    def logprob(self, seen: Tensor, acts: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of actions ``[N, parts]``, each ``[N]``."""
        heads = self.heads(seen)
        chosen = [head.gather(-1, acts[:, [part]]) for part, head in enumerate(heads)]
        entropies = [-(head.exp() * head).sum(-1) for head in heads]
        return torch.cat(chosen, -1).sum(-1), torch.stack(entropies).sum(0)

    def act(self, seen: Tensor) -> Tensor:
        """Sample actions ``[N, parts]``."""
        with torch.no_grad():
            return torch.cat([head.exp().multinomial(1) for head in self.heads(seen)], -1)


@dataclass(slots=True, kw_only=True)
class _Played:
    """``ticks`` steps of ``ENVS`` worlds, ``[T, B, ...]``; ``last``: features after them."""

    seen: Tensor
    acts: Tensor
    rewards: Tensor
    over: Tensor
    last: Tensor


def train(rules: Rules, seed: int, decisions: int) -> Iterator[tuple[int, Trader]]:
    """Train until that many decisions are played → (decisions so far, policy), play by play."""
    torch.manual_seed(seed)
    env, trader = TraderVectorEnv(ENVS, rules), Trader(rules)
    optimizer = torch.optim.Adam(trader.parameters(), lr=RATE)
    observation, _ = env.reset(seed=seed)
    seen, done = torch.as_tensor(observation), 0
    while done < decisions:
        window = _play(env, trader, seen, rules.ticks)
        seen = window.last
        _update(trader, optimizer, window)
        done += rules.ticks * ENVS
        yield done, trader


def _play(env: TraderVectorEnv, trader: Trader, seen: Tensor, ticks: int) -> _Played:
    features, acts, rewards, over = [], [], [], []
    for _ in range(ticks):
        chosen = trader.act(seen)
        features.append(seen)
        acts.append(chosen)
        observation, reward, ended, _, _ = env.step(chosen.numpy())
        rewards.append(torch.as_tensor(np.asarray(reward), dtype=torch.float32))
        over.append(torch.as_tensor(np.asarray(ended)))
        seen = torch.as_tensor(observation)
    return _Played(
        seen=torch.stack(features),
        acts=torch.stack(acts),
        rewards=torch.stack(rewards),
        over=torch.stack(over),
        last=seen,
    )


def _update(trader: Trader, optimizer: torch.optim.Optimizer, play: _Played) -> None:
    with torch.no_grad():
        values = trader.worth(play.seen)
        after = torch.cat([values[1:], trader.worth(play.last)[None]])
        advantages = torch.zeros_like(play.rewards)
        ahead = torch.zeros(ENVS)
        for tick in reversed(range(len(play.rewards))):
            alive = (~play.over[tick]).float()
            error = play.rewards[tick] + GAMMA * alive * after[tick] - values[tick]
            ahead = error + GAMMA * LAMBDA * alive * ahead
            advantages[tick] = ahead
        goals = (advantages + values).flatten()
        seen, acts = play.seen.flatten(0, 1), play.acts.flatten(0, 1)
        before, _ = trader.logprob(seen, acts)
    scaled = (advantages.flatten() - advantages.mean()) / (advantages.std() + 1e-6)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(seen)).chunk(BATCHES):
            logprob, entropy = trader.logprob(seen[rows], acts[rows])
            ratio = (logprob - before[rows]).exp()
            gain = torch.minimum(
                ratio * scaled[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * scaled[rows]
            )
            error = (trader.worth(seen[rows]) - goals[rows]).square().mean()
            loss = -gain.mean() + 0.5 * error - ENTROPY * entropy.mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trader.parameters(), 0.5)
            optimizer.step()


def pnl(trader: Trader, worlds: Sequence[Scenario], seed: int = 0) -> list[float]:
    """Play each world once, by sampled actions, and return the P&L of each in dollars."""
    torch.manual_seed(seed)
    found: list[float] = []
    for world in worlds:
        env = TraderVectorEnv(1, scenarios=[world])
        observation, _ = env.reset(seed=seed)
        earned = 0.0
        for _ in range(world.rules.ticks):
            acts = trader.act(torch.as_tensor(observation))
            observation, reward, *_ = env.step(acts.numpy())
            earned += REWARD_USD * float(reward[0])
        found.append(earned)
    return found
