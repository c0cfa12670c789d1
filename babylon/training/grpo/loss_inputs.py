"""Named tensors that a loss reads and returns, and the bounds of its ratios."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Importance = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBounds:
    """Bounds at which ratios are clipped, truncated and masked, by default the published ones."""

    clip_low: float = 0.8
    clip_high: float = 1.28  # DAPO, arXiv 2503.14476, section 3.1
    dual_clip: float = 3.0  # arXiv 1912.09729, eq. 5
    importance: Importance = "token_truncate"
    max_importance: float = 2.0
    band_low: float = 0.5
    band_high: float = 5.0
    negative_call_drift: float = 0.05  # nats a token
    impossible_ratio: float = 1e-4
    kl_clamp: float = 10.0  # nats: one token must not outweigh its call
    teacher_clamp: float = 5.0  # nats
    cispo_max: float = 5.0
    gspo_low: float = 1 - 3e-4  # GSPO, arXiv 2507.18071, section 5.1
    gspo_high: float = 1 + 4e-4
    sapo_positive: float = 1.0  # SAPO, arXiv 2511.20347
    sapo_negative: float = 1.05
    dr_grpo_length: int = 256  # tokens: Dr. GRPO's constant normaliser, the budget of one reply


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """C calls of up to T tokens, padded on the right with logprobs of zero.

    Log-probabilities are at the logged temperature.
    """

    theta: Tensor  # [C, T], with gradient
    proximal: Tensor  # [C, T]
    mu: Tensor  # [C, T]
    known: Tensor  # [C, T] bool, where mu is known
    mask: Tensor  # [C, T] bool, the completion tokens
    advantage: Tensor  # [C]
    reference: Tensor | None = None  # [C, T], for a KL penalty
    entropy: Tensor | None = None  # [C, T] of theta, nats, for an entropy floor
    teacher: Tensor | None = None  # [C, T], NaN where the teacher has no words

    def masked(self) -> "LossInputs":
        """The inputs with p beyond a call's end, where theta is arbitrary and could overflow."""
        return replace(self, theta=torch.where(self.mask, self.theta, self.proximal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Tokens that are left out, by reason, each ``[C, T]`` bool. mu of these tokens is known."""

    band: Tensor  # pi_theta / mu is outside the band
    negative: Tensor  # the call has A < 0 and theta has already moved away from it
    impossible: Tensor  # one of the call's tokens is almost impossible under p

    @property
    def dropped(self) -> Tensor:
        return self.band | self.negative | self.impossible


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Loss of every token before its call's weight, with masks and clips."""

    loss: Tensor  # [C, T], differentiable in theta; 0 where masked
    masks: Masks
    clipped_low: Tensor  # [C, T] bool
    clipped_high: Tensor  # [C, T] bool
