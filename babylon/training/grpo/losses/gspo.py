"""GSPO: one ratio a call, the geometric mean of its tokens' (arXiv 2507.18071, eq. 5 to 7).

``w * min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)`` with ``s = exp(mean log(pi_theta / pi_p))``. Every
call weighs the same, whatever its length: each of its T tokens carries the call's term, weighted
by 1/T. Importance weight and band are also those of the whole call.
"""

import torch

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def gspo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """Call-wise ratios. A clipped call has no gradient."""
    a = inputs.advantage[:, None]
    s = torch.exp(_mean(inputs.theta - inputs.proximal, inputs.mask))
    surrogate = torch.minimum(s * a, s.clamp(bounds.gspo_low, bounds.gspo_high) * a)
    known = inputs.known & inputs.mask
    w = torch.exp(_mean(inputs.proximal - inputs.mu, known)).clamp(max=bounds.max_importance)
    moved = torch.exp(_mean(inputs.theta.detach() - inputs.mu, known))
    outside = (moved < bounds.band_low) | (moved > bounds.band_high)
    low, high = shared.clipped_sides(s, a, bounds.gspo_low, bounds.gspo_high)
    return shared.finish(
        inputs,
        (w * surrogate).expand_as(inputs.theta),
        shared.call_masks(inputs, bounds, band=inputs.mask & outside),
        low=low,
        high=high,
    )


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each call ``[C, 1]``, 0 without tokens."""
    total = torch.where(mask, values, 0.0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)
