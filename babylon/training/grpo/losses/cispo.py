"""CISPO: clip the importance weight, and keep the token.

``sg[min(pi_theta / mu, 5)] * A * log pi_theta`` (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5). Rare
but important tokens, which a PPO clip drops first, keep their gradient. The cap replaces the band
mask.
"""

from babylon.training.grpo.losses import shared
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms


def cispo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """A policy gradient with a bounded weight on every token."""
    weight = shared.behaviour_ratio(inputs)
    capped = weight > bounds.cispo_max
    objective = weight.clamp(max=bounds.cispo_max) * inputs.advantage[:, None] * inputs.theta
    return shared.finish(
        inputs,
        objective,
        shared.call_masks(inputs, bounds),
        low=capped & False,
        high=capped,
    )
