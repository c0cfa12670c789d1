"""The losses by name: pure functions from named tensors to the loss of every token.

A step's loss is ``sum_calls weight_c * sum_tokens loss``. The weights belong to the step, so the
sum does not depend on how the step is split into portions. A loss whose definition includes a
normaliser always uses it; the others use ``call_weight``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from babylon.training.grpo.advantage import CallWeight
from babylon.training.grpo.losses.cispo import cispo
from babylon.training.grpo.losses.dapo import dapo
from babylon.training.grpo.losses.dr_grpo import dr_grpo
from babylon.training.grpo.losses.gspo import gspo
from babylon.training.grpo.losses.ppo_clip import ppo_clip
from babylon.training.grpo.losses.reinforce_is import reinforce_is
from babylon.training.grpo.losses.shared import LossBounds, LossInputs, LossTerms, kl_anchor


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, with its normaliser if its definition includes one.

    ``clip_is_far``: a clipped token has moved far, so many clipped tokens stop the update early.
    """

    terms: Callable[[LossInputs, LossBounds], LossTerms]
    call_weight: CallWeight | None = None
    clip_is_far: bool = True


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip),
    "cispo": Loss(cispo),
    "gspo": Loss(gspo, "call", clip_is_far=False),  # clips at 3e-4, which every step reaches
    "dapo": Loss(dapo, "token"),
    "dr_grpo": Loss(dr_grpo, "constant"),
    "reinforce_is": Loss(reinforce_is),
}


def loss_terms(
    name: str, inputs: LossInputs, bounds: LossBounds, kl_penalty: float = 0.0
) -> LossTerms:
    """The named loss of every token, with ``kl_penalty * w * r * k3(theta || reference)`` added."""
    # values beyond a call's end are arbitrary and could overflow
    inputs = replace(inputs, theta=torch.where(inputs.mask, inputs.theta, inputs.proximal))
    terms = LOSSES[name].terms(inputs, bounds)
    if not kl_penalty:
        return terms
    return replace(terms, loss=terms.loss + kl_penalty * kl_anchor(inputs, bounds))
