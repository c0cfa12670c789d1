"""Terms that are added to a loss: distances from reference and teacher, and an entropy floor."""

from dataclasses import replace

import torch
from torch import Tensor

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.loss_inputs import LossBounds, LossInputs, LossTerms
from babylon.training.grpo.losses import importance, mean, ratio


def penalised(
    terms: LossTerms, inputs: LossInputs, config: TrainerConfig, signal: float
) -> LossTerms:
    """The loss of every token with the penalties of the configuration.

    Args:
        signal: mean size of the window's advantages, to which the weights of entropy and teacher
            are relative. If it is 0, the teacher's weight is 1 unless ``words_weight`` is 0.
    """
    loss, given = terms.loss, inputs.masked()
    if config.kl_penalty:
        loss = loss + config.kl_penalty * kl_anchor(given, config.bounds)
    if config.entropy_floor:
        more = entropy_floor(given, config.entropy_floor)
        weight = config.entropy_weight * signal
        loss = loss + weight * torch.where(terms.masks.dropped, 0.0, more)
    if given.teacher is not None and config.words_weight:
        weight = config.words_weight * signal or 1.0  # words alone have no advantages
        apart = teacher_distance(given, given.teacher, config.bounds)
        loss = loss + weight * torch.where(terms.masks.dropped, 0.0, apart)
    return replace(terms, loss=loss)


def kl_anchor(inputs: LossInputs, bounds: LossBounds) -> Tensor:
    """``distance`` from the reference, ``[C, T]``: the gradient of the KL divergence to it.

    That of ``w * r * k3(theta || reference)`` (arXiv 2512.02556, eq. 7), and bounded. A clamp on k3
    itself would turn the gradient around where theta has fallen 2.6 nats below the reference.
    """
    if inputs.reference is None:
        raise ValueError("a KL penalty needs the logprobs of a reference policy, got none")
    return distance(inputs, inputs.reference, bounds.kl_clamp, bounds)


def teacher_distance(inputs: LossInputs, teacher: Tensor, bounds: LossBounds) -> Tensor:
    """``distance`` from the teacher, ``[C, T]``, 0 where the teacher has no words.

    Its gradient is that of SDPO (arXiv 2601.20802, its token-level form) and of on-policy
    distillation: ``log teacher - log pi_theta`` is the token's advantage.
    """
    return distance(inputs, teacher, bounds.teacher_clamp, bounds)


def distance(inputs: LossInputs, other: Tensor, clamp: float, bounds: LossBounds) -> Tensor:
    """``w * r * sg[log pi_theta - log other]`` ``[C, T]``, 0 beyond the mask and where NaN.

    The estimate of ``KL(theta || other)`` at the sampled token, within ``clamp`` nats. It vanishes
    where theta agrees with the other.
    """
    apart = (inputs.theta.detach() - other).clamp(-clamp, clamp)
    known = inputs.mask & ~other.isnan()
    return torch.where(known, importance(inputs, bounds) * ratio(inputs) * apart.nan_to_num(), 0.0)


def entropy_floor(inputs: LossInputs, floor: float) -> Tensor:
    """``-H`` ``[C, T]``, nats, in calls whose mean entropy is below ``floor``, 0 in others.

    An entropy bonus (Williams and Peng 1991) that ends where replies are varied enough. Tokens
    without a choice, such as a format's, have H = 0 and no gradient.
    """
    if inputs.entropy is None:
        raise ValueError("an entropy floor needs the entropies of the policy, got none")
    low = mean(inputs.entropy.detach(), inputs.mask) < floor
    return torch.where(inputs.mask & low, -inputs.entropy, 0.0)
