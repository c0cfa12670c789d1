"""CISPO: the importance weight is clipped, the token is never dropped for it.

``sg[min(pi_theta / mu, 5)] * A * log pi_theta`` (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5). Rare
tokens that matter, the first to leave a PPO clip, go on teaching. The cap takes the place of the
band mask.
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
