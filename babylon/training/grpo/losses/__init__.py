"""The losses by name: pure functions from named tensors to the loss of every token.

A step's loss is ``sum_calls weight_c * sum_tokens loss``: it adds up over any split of the step
into portions, because the weights are the step's. Some losses are defined by their normaliser and
bring it along; the others take ``call_weight``.
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
    """A loss and, where its definition includes one, its normaliser.

    ``clip_is_far``: a clipped token is one that has moved far, so that many of them end an update.
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
    # what a model predicts beyond a call's end is no number to compute with
    inputs = replace(inputs, theta=torch.where(inputs.mask, inputs.theta, inputs.proximal))
    terms = LOSSES[name].terms(inputs, bounds)
    if not kl_penalty:
        return terms
    return replace(terms, loss=terms.loss + kl_penalty * kl_anchor(inputs, bounds))
