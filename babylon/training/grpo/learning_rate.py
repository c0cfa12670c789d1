"""The learning rate of a train step: warm-up, and a factor that follows a target divergence.

Both are kept in the optimiser's groups and saved with it: the count of train steps, so that it
warms up only once, and the factor.
"""

import torch

from babylon.training.grpo.config import TrainerConfig

_TAKEN, _FACTOR = "train_steps", "rate_factor"
# Windows that move nothing would double it for ever. One update's undoing must be able to halve it
# back to where the policy stays within its bounds.
MOST_FACTOR = 1000.0


def begin_rate(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> None:
    """Begin an update. A rate that the configuration fixes has no factor from before."""
    before = optimizer.param_groups[0].get(_FACTOR, 1.0)
    set_rate_factor(optimizer, before if config.target_kl else 1.0)


def next_rate(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> float:
    """Set and return the rate of the next step: linear warm-up, then the factor alone."""
    rate = 0.0
    for group in optimizer.param_groups:
        group[_TAKEN] = group.get(_TAKEN, 0) + 1
        warm = min(1.0, group[_TAKEN] / (config.warmup_steps + 1))
        rate = group["lr"] = group[_FACTOR] * config.learning_rate * warm
    return rate


def rate_factor(optimizer: torch.optim.Optimizer) -> float:
    """The present factor."""
    return float(optimizer.param_groups[0][_FACTOR])


def set_rate_factor(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the factor of the steps that follow."""
    for group in optimizer.param_groups:
        group[_FACTOR] = factor


def adapt_rate(
    optimizer: torch.optim.Optimizer, config: TrainerConfig, moved: float, share: float
) -> None:
    """Raise or lower the rate, twofold at most, where the policy should move more or less.

    It stays below ``MOST_FACTOR`` times the configured one.

    The divergence grows with the square of the distance. The policy should therefore have reached
    ``target_kl * share^2`` after a share of the update, and the rate follows the root of the ratio.
    Schulman et al. 2017 (arXiv 1707.06347, section 4) adapt a penalty to a target divergence, Rudin
    et al. 2021 (arXiv 2109.11978, section 3.2) the learning rate.

    Args:
        moved: divergence from the parent in nats a token, as ``target_kl``.
        share: part of the update's steps that had been taken when it was measured.
    """
    if config.target_kl is None or share <= 0:
        return
    goal = config.target_kl * share**2
    factor = min(2.0, max(0.5, (goal / max(moved, goal / 4)) ** 0.5))
    set_rate_factor(optimizer, min(rate_factor(optimizer) * factor, MOST_FACTOR))
