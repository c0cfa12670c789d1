"""The losses by name: pure functions from named tensors to the loss of every token.

mu is the policy that sampled the tokens (logged), p the checkpoint at window start, and theta the
policy in training. The behaviour policy is decoupled from the proximal one (AReaL, arXiv
2505.24298, eq. 5): the ratio ``r = pi_theta / pi_p`` is clipped, and ``w = min(pi_p / mu, 2)``,
without gradient, corrects for the difference between p and mu (truncated importance sampling:
Ionides 2008, J. Comput. Graph. Stat. 17, doi 10.1198/106186008X320456). Where a paper has no logged
policy, importance weight and masks are our additions.

A step's loss is ``sum_calls weight_c * sum_tokens loss``. The weights belong to the step, so the
sum does not depend on how the step is split into portions. A loss whose definition includes a
normaliser always uses it; the others use ``call_weight``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from babylon.training.grpo.advantage import CallWeight
from babylon.training.grpo.loss_inputs import LossBounds, LossInputs, LossTerms, Masks

MAX_LOG_RATIO = 20.0  # above every clip and clamp, below overflow


def ratio(inputs: LossInputs) -> Tensor:
    """``r = pi_theta / pi_p`` ``[C, T]``, bounded above so that it cannot overflow.

    A token that is almost impossible under p could make it infinite, and infinity times the zero of
    a mask is NaN.
    """
    return torch.exp((inputs.theta - inputs.proximal).clamp(max=MAX_LOG_RATIO))


def importance(inputs: LossInputs, bounds: LossBounds) -> Tensor:
    """``w = sg[min(pi_p / mu, 2)]`` ``[C, T]``; 1 where mu is unknown.

    ``token_mask`` drops tokens whose ``pi_p / mu`` leaves the band and truncates none (IcePop,
    arXiv 2510.18855). ``sequence_truncate`` and ``sequence_mask`` take the ratio of
    the whole call: unbiased, and of a variance that grows with the call's length.
    """
    log = torch.where(inputs.known & inputs.mask, inputs.proximal - inputs.mu, 0.0)
    if bounds.importance.startswith("sequence"):
        log = log.sum(-1, keepdim=True).expand_as(log)
    raw = torch.exp(log.clamp(max=MAX_LOG_RATIO))
    if bounds.importance == "token_mask":
        return raw * ((raw >= bounds.band_low) & (raw <= bounds.band_high))
    if bounds.importance == "sequence_mask":
        return raw * (raw <= bounds.max_importance)
    return raw.clamp(max=bounds.max_importance)


def _behaviour_ratio(inputs: LossInputs) -> Tensor:
    """``sg[pi_theta / mu]`` ``[C, T]``, with p in place of an unknown mu."""
    sampled = torch.where(inputs.known, inputs.mu, inputs.proximal)
    return torch.exp(inputs.theta.detach() - sampled)


def _token_masks(inputs: LossInputs, bounds: LossBounds) -> Masks:
    moved = _behaviour_ratio(inputs)
    outside = (moved < bounds.band_low) | (moved > bounds.band_high)
    return _call_masks(inputs, bounds, band=inputs.known & inputs.mask & outside)


def _call_masks(inputs: LossInputs, bounds: LossBounds, *, band: Tensor | None = None) -> Masks:
    known = inputs.known & inputs.mask
    drift = torch.where(known, inputs.mu - inputs.theta.detach(), 0.0).sum(-1)
    moved_away = drift / known.sum(-1).clamp(min=1) > bounds.negative_call_drift
    gone = known & (torch.exp(inputs.proximal - inputs.mu) < bounds.impossible_ratio)
    return Masks(
        band=torch.zeros_like(inputs.mask) if band is None else band,
        negative=inputs.mask & ((inputs.advantage < 0) & moved_away)[:, None],
        impossible=inputs.mask & gone.any(-1, keepdim=True),
    )


def _finish(
    inputs: LossInputs, objective: Tensor, masks: Masks, *, low: Tensor, high: Tensor
) -> LossTerms:
    kept = inputs.mask & ~masks.dropped
    return LossTerms(
        loss=torch.where(kept, -objective, 0.0),
        masks=masks,
        clipped_low=low & inputs.mask,
        clipped_high=high & inputs.mask,
    )


def _clip(
    inputs: LossInputs, bounds: LossBounds, low: float, high: float, dual: float | None = None
) -> LossTerms:
    """``w * min(r A, clip(r, low, high) A)``, for A < 0 not below ``dual * A``.

    A clipped token keeps its value and has no gradient.
    """
    a, r = inputs.advantage[:, None], ratio(inputs)
    surrogate = torch.minimum(r * a, r.clamp(low, high) * a)
    above = (a > 0) & (r > high)
    if dual is not None:
        surrogate = torch.where(a < 0, torch.maximum(surrogate, dual * a), surrogate)
        above |= (a < 0) & (r > dual)
    objective = importance(inputs, bounds) * surrogate
    masks = _token_masks(inputs, bounds)
    return _finish(inputs, objective, masks, low=(a < 0) & (r < low), high=above)


def ppo_clip(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """The default: decoupled PPO with an asymmetric clip and a dual clip.

    ``w * min(r A, clip(r, 0.8, 1.28) A)``, and not below ``3 A`` for A < 0. Decoupled behaviour and
    proximal policy: AReaL (arXiv 2505.24298, eq. 5). Asymmetric clip: DAPO (arXiv 2503.14476,
    eq. 10). Dual clip: arXiv 1912.09729, eq. 5.
    """
    return _clip(inputs, bounds, bounds.clip_low, bounds.clip_high, bounds.dual_clip)


def dapo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """DAPO: asymmetric clip, equal weight of all tokens of a step (arXiv 2503.14476, eq. 8 to 10).

    ``w * min(r A, clip(r, 0.8, 1.28) A)`` divided by the step's number of tokens. The paper's
    advantage is the group's score divided by its standard deviation: ``advantage="group_std"``.
    """
    return _clip(inputs, bounds, bounds.clip_low, bounds.clip_high)


def dr_grpo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """Dr. GRPO: a symmetric clip and a constant normaliser (arXiv 2503.20783, section 3.2).

    ``w * min(r A, clip(r, 0.8, 1.2) A)`` divided by the step's calls and the budget of one reply, a
    constant: neither a reply's length nor its group's spread changes the weight of a token. The
    paper's advantage is the score less the group's mean: that of ``advantage="leave_one_out"`` up
    to the factor n / (n - 1).
    """
    return _clip(inputs, bounds, bounds.clip_low, 2 - bounds.clip_low)


def _capped(inputs: LossInputs, cap: float, masks: Masks) -> LossTerms:
    """``sg[min(pi_theta / mu, cap)] * A * log pi_theta``."""
    weight = _behaviour_ratio(inputs)
    objective = weight.clamp(max=cap) * inputs.advantage[:, None] * inputs.theta
    over = weight > cap
    return _finish(inputs, objective, masks, low=over & False, high=over)


def cispo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """CISPO: clip the importance weight, and keep the token.

    ``sg[min(pi_theta / mu, 5)] * A * log pi_theta`` (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).
    Rare but important tokens, which a PPO clip drops first, keep their gradient. The cap replaces
    the band mask.
    """
    return _capped(inputs, bounds.cispo_max, _call_masks(inputs, bounds))


def reinforce_is(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """REINFORCE with truncated importance sampling: no proximal policy, no clip.

    ``sg[min(pi_theta / mu, 2)] * A * log pi_theta`` (Williams 1992; truncation as in V-trace, arXiv
    1802.01561, eq. 1). This is the simplest loss. Only the masks bound how far the policy moves.
    """
    return _capped(inputs, bounds.max_importance, _token_masks(inputs, bounds))


def gspo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """GSPO: one ratio a call, the geometric mean of its tokens' (arXiv 2507.18071, eq. 5 to 7).

    ``w * min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)`` with ``s = exp(mean log(pi_theta / pi_p))``.
    Every call weighs the same, whatever its length: each of its T tokens carries the call's term,
    weighted by 1/T. Importance weight and band are also those of the whole call.
    """
    a, low, high = inputs.advantage[:, None], bounds.gspo_low, bounds.gspo_high
    s = torch.exp(mean(inputs.theta - inputs.proximal, inputs.mask))
    surrogate = torch.minimum(s * a, s.clamp(low, high) * a)
    known = inputs.known & inputs.mask
    w = torch.exp(mean(inputs.proximal - inputs.mu, known)).clamp(max=bounds.max_importance)
    moved = torch.exp(mean(inputs.theta.detach() - inputs.mu, known))
    outside = (moved < bounds.band_low) | (moved > bounds.band_high)
    masks = _call_masks(inputs, bounds, band=inputs.mask & outside)
    objective = (w * surrogate).expand_as(inputs.theta)
    below, above = (a < 0) & (s < low), (a > 0) & (s > high)
    return _finish(inputs, objective, masks, low=below, high=above)


def gspo_token(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """GSPO-token: GSPO's ratio in value, each token's own gradient (arXiv 2507.18071, eq. 13, 14).

    With one advantage a call, its gradient is that of GSPO. Masks and weights are those of tokens.
    """
    a, low, high = inputs.advantage[:, None], bounds.gspo_low, bounds.gspo_high
    s = torch.exp(mean(inputs.theta - inputs.proximal, inputs.mask)).detach()
    own = s * torch.exp(inputs.theta - inputs.theta.detach())
    surrogate = torch.minimum(own * a, own.clamp(low, high) * a)
    objective = importance(inputs, bounds) * surrogate
    below, above = (a < 0) & (s < low), (a > 0) & (s > high)
    return _finish(inputs, objective, _token_masks(inputs, bounds), low=below, high=above)


def sapo(inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """SAPO: a smooth gate in place of the clip (arXiv 2511.20347).

    ``w * A * (4 / tau) * sigmoid(tau (r - 1))`` with ``tau`` 1 for A > 0, and 1.05 for A < 0, whose
    gradients spread over the vocabulary and fade sooner.
    """
    a, r = inputs.advantage[:, None], ratio(inputs)
    tau = torch.where(a > 0, bounds.sapo_positive, bounds.sapo_negative)
    objective = importance(inputs, bounds) * a * torch.sigmoid(tau * (r - 1)) * 4 / tau
    nothing = torch.zeros_like(inputs.mask)
    return _finish(inputs, objective, _token_masks(inputs, bounds), low=nothing, high=nothing)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each call ``[C, 1]``, 0 without tokens."""
    total = torch.where(mask, values, 0.0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, with its normaliser if its definition includes one.

    ``clip_is_far``: a clipped token has moved far from the parent, so many of them stop the update
    early. A cap on ``pi_theta / mu`` does not show that: an older policy's tokens may exceed it
    before the first step.
    """

    terms: Callable[[LossInputs, LossBounds], LossTerms]
    call_weight: CallWeight | None = None
    clip_is_far: bool = True


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip),
    "cispo": Loss(cispo, clip_is_far=False),
    "gspo": Loss(gspo, "call", clip_is_far=False),  # clips at 3e-4, which every step reaches
    "gspo_token": Loss(gspo_token, "call", clip_is_far=False),
    "sapo": Loss(sapo, clip_is_far=False),
    "dapo": Loss(dapo, "token"),
    "dr_grpo": Loss(dr_grpo, "constant"),
    "reinforce_is": Loss(reinforce_is, clip_is_far=False),
}


def loss_terms(name: str, inputs: LossInputs, bounds: LossBounds) -> LossTerms:
    """The named loss of every token."""
    return LOSSES[name].terms(inputs.masked(), bounds)
