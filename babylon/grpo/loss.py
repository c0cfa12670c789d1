"""The default loss: decoupled PPO on logged calls, with three policies.

mu sampled the tokens (logged), p is the checkpoint at window start, theta is being trained:

``L = -sum_calls weight * sum_tokens w * m * min(r A, clip(r, 0.8, 1.28) A)``
with ``r = pi_theta / pi_p`` and ``w = min(pi_p / mu, 2)`` without gradient.

Decoupling behaviour from proximal policy: AReaL (arXiv 2505.24298, eq. 5). Asymmetric clip: DAPO
(arXiv 2503.14476, eq. 10). Dual clip for A < 0: arXiv 1912.09729, eq. 5. Truncated importance
weight: arXiv 2510.18927. Masks m: tokens whose ``pi_theta / mu`` leaves [0.5, 5]; calls with A < 0
that theta has already moved away from; calls with a token that p finds impossible, which is
usually a tokenisation or version bug. Tokens whose mu is unknown have w = 1 and no such mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # far beyond the clamp of k3, and short of overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Bounds of the loss; the defaults are the published ones."""

    clip_low: float = 0.8
    clip_high: float = 1.28
    dual_clip: float = 3.0
    max_importance: float = 2.0
    band_low: float = 0.5
    band_high: float = 5.0
    negative_call_drift: float = (
        0.05  # mean log(mu / pi_theta) above which a call with A < 0 is cut
    )
    impossible_ratio: float = 1e-4
    kl_penalty: float = 0.0  # weight of ratio * k3(theta || reference)
    kl_clamp: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the trained tokens of a batch, ready to be added over micro-batches."""

    loss: Tensor
    tokens: int
    clipped: int
    masked_band: int
    masked_negative: int
    masked_impossible: int
    masked: int  # by any of the three
    kl_sum: float  # k3(p || theta), nats, over all tokens
    known: int  # tokens whose mu is known
    importance_sum: float  # of pi_p / mu before truncation, over the known tokens
    importance_square_sum: float
    entropy_sum: float


def decoupled_ppo_loss(
    theta: Tensor,
    proximal: Tensor,
    mu: Tensor,
    has_mu: Tensor,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: LossConfig,
    *,
    entropy: Tensor | None = None,
    reference: Tensor | None = None,
) -> LossTerms:
    """Loss of a batch of C calls with up to T tokens; differentiable in ``theta``.

    Args:
        theta, proximal, mu: log-probabilities ``[C, T]``; only theta carries a gradient.
        has_mu: ``[C, T]`` bool, where mu is known.
        mask: ``[C, T]`` bool, the completion tokens.
        advantage, weight: ``[C]``.
        entropy: ``[C, T]`` of theta, for the record.
        reference: ``[C, T]``; needed when ``config.kl_penalty`` is set.
    """
    theta = torch.where(mask, theta, proximal)  # what padding predicts must not overflow
    a = advantage[:, None]
    ratio = torch.exp(theta - proximal)
    raw = torch.where(has_mu, torch.exp(proximal - mu), 1.0)
    importance = raw.clamp(max=config.max_importance)
    surrogate = torch.minimum(ratio * a, ratio.clamp(config.clip_low, config.clip_high) * a)
    surrogate = torch.where(a < 0, torch.maximum(surrogate, config.dual_clip * a), surrogate)
    masks = _masks(theta.detach(), proximal, mu, has_mu, mask, advantage, config)
    kept = mask & ~(masks.band | masks.negative[:, None] | masks.impossible[:, None])
    per_token = -importance * surrogate * kept
    if config.kl_penalty:
        if reference is None:
            raise ValueError("kl_penalty is set but no reference log-probabilities were passed")
        anchor = ratio * _k3(theta, torch.where(mask, reference, theta), config.kl_clamp)
        per_token = per_token + config.kl_penalty * mask * anchor
    clipped = ((a > 0) & (ratio > config.clip_high)) | ((a < 0) & (ratio < config.clip_low))
    return LossTerms(
        loss=(per_token.sum(-1) * weight).sum(),
        tokens=int(mask.sum()),
        clipped=int((clipped & mask).sum()),
        masked_band=int(masks.band.sum()),
        masked_negative=int((masks.negative[:, None] & mask).sum()),
        masked_impossible=int((masks.impossible[:, None] & mask).sum()),
        masked=int((mask & ~kept).sum()),
        kl_sum=float((_k3(proximal, theta.detach(), config.kl_clamp) * mask).sum()),
        known=int((has_mu & mask).sum()),
        importance_sum=float((raw * (has_mu & mask)).sum()),
        importance_square_sum=float((raw.square() * (has_mu & mask)).sum()),
        entropy_sum=0.0 if entropy is None else float((entropy.detach() * mask).sum()),
    )


@dataclass(frozen=True, slots=True)
class _Masks:
    band: Tensor  # [C, T]
    negative: Tensor  # [C]
    impossible: Tensor  # [C]


def _masks(
    theta: Tensor,
    proximal: Tensor,
    mu: Tensor,
    has_mu: Tensor,
    mask: Tensor,
    advantage: Tensor,
    config: LossConfig,
) -> _Masks:
    known = has_mu & mask
    moved = torch.exp(theta - mu)
    band = known & ((moved < config.band_low) | (moved > config.band_high))
    drift = torch.where(known, mu - theta, 0.0).sum(-1) / known.sum(-1).clamp(min=1)
    negative = (advantage < 0) & (drift > config.negative_call_drift)
    floor = torch.log(torch.tensor(config.impossible_ratio))
    impossible = (known & (proximal - mu < floor)).any(-1)
    return _Masks(band, negative, impossible)


def _k3(sampled: Tensor, other: Tensor, clamp: float) -> Tensor:
    """Schulman's k3 estimate of KL(sampled || other) at each token, >= 0."""
    delta = (other - sampled).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (torch.exp(delta) - delta - 1.0).clamp(max=clamp)
