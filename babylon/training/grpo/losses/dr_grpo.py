"""Dr. GRPO: a symmetric clip and a constant normaliser (arXiv 2503.20783, section 3.2).

``w * min(r A, clip(r, 0.8, 1.2) A)`` divided by the step's calls and the budget of one reply, a
constant: neither a reply's length nor its group's spread changes the weight of a token. The
paper's advantage is the score less the group's mean: that of ``advantage="leave_one_out"`` up to
the factor n / (n - 1). The importance weight w and the masks are our additions, as in dapo.
"""

import torch

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def dr_grpo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """Token-wise ratios, clipped symmetrically."""
    a, r = inputs.advantage[:, None], shared.ratio(inputs)
    below, above = bounds.clip_low, 2 - bounds.clip_low
    surrogate = torch.minimum(r * a, r.clamp(below, above) * a)
    low, high = shared.clipped_sides(r, a, below, above)
    return shared.finish(
        inputs,
        shared.importance(inputs, bounds) * surrogate,
        shared.token_masks(inputs, bounds),
        low=low,
        high=high,
    )
