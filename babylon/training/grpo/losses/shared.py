"""The parts of every loss: three policies' logprobs, importance weights, masks, and bounds.

mu is the policy that sampled the tokens (logged), p the checkpoint at window start, and theta the
policy in training. The behaviour policy is decoupled from the proximal one (AReaL, arXiv
2505.24298, eq. 5): the ratio ``r = pi_theta / pi_p`` is clipped, and ``w = min(pi_p / mu, 2)``,
without gradient, corrects for the difference between p and mu (truncated importance sampling:
Ionides 2008, J. Comput. Graph. Stat. 17, doi 10.1198/106186008X320456).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # above every clip and clamp, below overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBounds:
    """Bounds at which ratios are clipped, truncated and masked, by default the published ones."""

    clip_low: float = 0.8
    clip_high: float = 1.28  # DAPO, arXiv 2503.14476, section 3.1
    dual_clip: float = 3.0  # arXiv 1912.09729, eq. 5
    max_importance: float = 2.0
    band_low: float = 0.5
    band_high: float = 5.0
    negative_call_drift: float = 0.05  # nats a token
    impossible_ratio: float = 1e-4
    kl_clamp: float = 10.0
    cispo_max: float = 5.0
    gspo_low: float = 1 - 3e-4  # GSPO, arXiv 2507.18071, section 5.1
    gspo_high: float = 1 + 4e-4
    dr_grpo_length: int = 256  # tokens: Dr. GRPO's constant normaliser, the budget of one reply


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """C calls of up to T tokens, padded on the right with logprobs of zero.

    Log-probabilities are at the logged temperature.
    """

    theta: Tensor  # [C, T], with gradient
    proximal: Tensor  # [C, T]
    mu: Tensor  # [C, T]
    known: Tensor  # [C, T] bool, where mu is known
    mask: Tensor  # [C, T] bool, the completion tokens
    advantage: Tensor  # [C]
    reference: Tensor | None = None  # [C, T], for a KL penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Tokens that are left out, by reason, each ``[C, T]`` bool. mu of these tokens is known."""

    band: Tensor  # pi_theta / mu is outside the band
    negative: Tensor  # the call has A < 0 and theta has already moved away from it
    impossible: Tensor  # one of the call's tokens is almost impossible under p

    @property
    def dropped(self) -> Tensor:
        """Tokens that are left out for any reason."""
        return self.band | self.negative | self.impossible


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Loss of every token before its call's weight, with masks and clips."""

    loss: Tensor  # [C, T], differentiable in theta; 0 where masked
    masks: Masks
    clipped_low: Tensor  # [C, T] bool
    clipped_high: Tensor  # [C, T] bool


def ratio(inputs: LossInputs) -> Tensor:
    """``r = pi_theta / pi_p`` ``[C, T]``, bounded above so that it cannot overflow.

    A token that is almost impossible under p could make it infinite, and infinity times the zero of
    a mask is NaN.
    """
    return torch.exp((inputs.theta - inputs.proximal).clamp(max=_MAX_LOG_RATIO))


def raw_importance(inputs: LossInputs) -> Tensor:
    """``pi_p / mu`` ``[C, T]`` before truncation; 1 where mu is unknown."""
    return torch.where(inputs.known, torch.exp(inputs.proximal - inputs.mu), 1.0)


def importance(inputs: LossInputs, bounds: LossBounds) -> Tensor:
    """``w = sg[min(pi_p / mu, 2)]`` ``[C, T]``."""
    return raw_importance(inputs).clamp(max=bounds.max_importance)


def behaviour_ratio(inputs: LossInputs) -> Tensor:
    """``sg[pi_theta / mu]`` ``[C, T]``, with p in place of an unknown mu."""
    sampled = torch.where(inputs.known, inputs.mu, inputs.proximal)
    return torch.exp(inputs.theta.detach() - sampled)


def token_masks(inputs: LossInputs, bounds: LossBounds) -> Masks:
    """Masks of tokens outside the band, and of calls that are left out as a whole."""
    moved = behaviour_ratio(inputs)
    outside = (moved < bounds.band_low) | (moved > bounds.band_high)
    return call_masks(inputs, bounds, band=inputs.known & inputs.mask & outside)


def call_masks(inputs: LossInputs, bounds: LossBounds, *, band: Tensor | None = None) -> Masks:
    """Masks of calls that are left out as a whole. ``band`` is empty by default."""
    known = inputs.known & inputs.mask
    drift = torch.where(known, inputs.mu - inputs.theta.detach(), 0.0).sum(-1)
    moved_away = drift / known.sum(-1).clamp(min=1) > bounds.negative_call_drift
    gone = known & (torch.exp(inputs.proximal - inputs.mu) < bounds.impossible_ratio)
    return Masks(
        band=torch.zeros_like(inputs.mask) if band is None else band,
        negative=inputs.mask & ((inputs.advantage < 0) & moved_away)[:, None],
        impossible=inputs.mask & gone.any(-1, keepdim=True),
    )


def finish(
    inputs: LossInputs, objective: Tensor, masks: Masks, *, low: Tensor, high: Tensor
) -> LossTerms:
    """The loss of the kept tokens, from the objective that is to be maximised."""
    kept = inputs.mask & ~masks.dropped
    return LossTerms(
        loss=torch.where(kept, -objective, 0.0),
        masks=masks,
        clipped_low=low & inputs.mask,
        clipped_high=high & inputs.mask,
    )


def clipped_sides(
    value: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Masks of tokens without gradient: A < 0 and below ``low``, A > 0 and above ``high``."""
    return (advantage < 0) & (value < low), (advantage > 0) & (value > high)


def kl_anchor(inputs: LossInputs, bounds: LossBounds) -> Tensor:
    """``w * r * k3(theta || reference)`` ``[C, T]``, 0 beyond the mask.

    The ratio to the behaviour policy, here ``w * r``, makes its gradient the gradient of the KL
    divergence (arXiv 2512.02556, eq. 7).
    """
    if inputs.reference is None:
        raise ValueError("a KL penalty needs the logprobs of a reference policy, got none")
    weight = importance(inputs, bounds) * ratio(inputs)
    anchor = weight * k3(inputs.theta, inputs.reference, bounds.kl_clamp)
    return torch.where(inputs.mask, anchor, 0.0)


def k3(sampled: Tensor, other: Tensor, clamp: float) -> Tensor:
    """Schulman's k3 estimate of KL(sampled || other) at each token, >= 0."""
    delta = (other - sampled).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (torch.exp(delta) - delta - 1.0).clamp(max=clamp)
