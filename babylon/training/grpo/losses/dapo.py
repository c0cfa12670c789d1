"""DAPO: asymmetric clip, equal weight of all tokens of a step (arXiv 2503.14476, eq. 8 to 10).

``w * min(r A, clip(r, 0.8, 1.28) A)`` divided by the step's number of tokens. The paper's
advantage is the group's score divided by its standard deviation: ``advantage="group_std"``. The
importance weight w and the masks are our additions for logged tokens.
"""

import torch

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def dapo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """Token-wise ratios without a dual clip."""
    a, r = inputs.advantage[:, None], shared.ratio(inputs)
    surrogate = torch.minimum(r * a, r.clamp(bounds.clip_low, bounds.clip_high) * a)
    low, high = shared.clipped_sides(r, a, bounds.clip_low, bounds.clip_high)
    return shared.finish(
        inputs,
        shared.importance(inputs, bounds) * surrogate,
        shared.token_masks(inputs, bounds),
        low=low,
        high=high,
    )
