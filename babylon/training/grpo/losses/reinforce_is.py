"""REINFORCE with truncated importance sampling: no proximal policy, no clip.

``sg[min(pi_theta / mu, 2)] * A * log pi_theta`` (Williams 1992; truncation as in V-trace, arXiv
1802.01561, eq. 1). This is the simplest loss. Only the masks bound how far the policy moves.
"""

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def reinforce_is(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """A policy gradient, weighted towards the trained policy."""
    weight = shared.behaviour_ratio(inputs)
    truncated = weight > bounds.max_importance
    objective = weight.clamp(max=bounds.max_importance) * inputs.advantage[:, None] * inputs.theta
    return shared.finish(
        inputs,
        objective,
        shared.token_masks(inputs, bounds),
        low=truncated & False,
        high=truncated,
    )
