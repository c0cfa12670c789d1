"""The default: decoupled PPO with an asymmetric clip and a dual clip.

``w * min(r A, clip(r, 0.8, 1.28) A)``, and not below ``3 A`` for A < 0. Decoupled behaviour and
proximal policy: AReaL (arXiv 2505.24298, eq. 5). Asymmetric clip: DAPO (arXiv 2503.14476,
eq. 10). Dual clip: arXiv 1912.09729, eq. 5.
"""

import torch

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def ppo_clip(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """Token-wise ratios. A clipped token keeps its value and has no gradient."""
    a, r = inputs.advantage[:, None], shared.ratio(inputs)
    surrogate = torch.minimum(r * a, r.clamp(bounds.clip_low, bounds.clip_high) * a)
    surrogate = torch.where(a < 0, torch.maximum(surrogate, bounds.dual_clip * a), surrogate)
    low, high = shared.clipped_sides(r, a, bounds.clip_low, bounds.clip_high)
    return shared.finish(
        inputs,
        shared.importance(inputs, bounds) * surrogate,
        shared.token_masks(inputs, bounds),
        low=low,
        high=high | ((a < 0) & (r > bounds.dual_clip)),
    )
