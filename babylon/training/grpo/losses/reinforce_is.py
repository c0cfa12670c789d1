"""REINFORCE with truncated importance sampling: no proximal policy, no clip.

``sg[min(pi_theta / mu, 2)] * A * log pi_theta`` (Williams 1992; truncation as in V-trace, arXiv
1802.01561, eq. 1). The simplest of the losses; the masks are all that bounds how far it goes.
"""

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def reinforce_is(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """A policy gradient, weighted towards the policy that is being trained."""
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
