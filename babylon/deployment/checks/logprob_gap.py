"""Distances between two models' logprobs of the same tokens. Pure functions.

``[N]`` are the tokens of all answers, concatenated. Engine and trainer differ by rounding: in fp32
on a CPU by 1e-7 nats on average and 5e-6 at most. With weights rounded to bf16, the demo's policies
move by 1e-3 to 4e-3 on average and 0.1 at most. Larger models sample unlikelier tokens and move by
several times that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from babylon.core.settings import Engine

CLEARLY = 6.0  # noises of the sum; half of the distance is then three standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Allowed distance of an engine's logprobs from the trainer's, in nats a token."""

    mean: float
    most: float


FINE = Tolerance(mean=1e-3, most=1e-2)  # fp32 in engine and trainer
COARSE = Tolerance(mean=3e-2, most=2.0)  # engine or trainer computes in 16 bits
FOUR_BITS = Tolerance(mean=0.1, most=4.0)  # the trainer's weights; the mean as in update_health


def tolerance(engine: Engine, vllm_args: str, precision: str) -> Tolerance:
    """The tolerance for an engine, and for a trainer whose frozen weights are in ``precision``.

    The embedded engine computes in fp32. vLLM does so only with ``--dtype float32``: by default it
    converts an fp32 checkpoint to 16 bits.
    """
    if precision != "fp32":
        return FOUR_BITS if precision == "nf4" else COARSE
    if engine == "embedded":
        return FINE
    given = vllm_args.replace("=", " ").split()
    types = [value for name, value in pairwise(given) if name == "--dtype"]
    return FINE if types[-1:] in (["float32"], ["float"]) else COARSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Mean and largest distance of two lists of logprobs, in nats."""

    mean: float
    most: float

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> "Gap":
        gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
        return cls(mean=fmean(gaps), most=max(gaps))

    def within(self, tolerance: Tolerance) -> bool:
        return self.mean <= tolerance.mean and self.most <= tolerance.most  # NaN is not


def is_nearer_to_other(
    engine: Sequence[float], policy: Sequence[float], other: Sequence[float]
) -> bool:
    """Return true if the engine's logprobs are the other policy's, not the policy's own.

    They must be nearer to the other's (sum of squares), and rounding must not explain it. With
    independent errors of standard deviation s, the sum of squares prefers the wrong policy when a
    standard normal variable exceeds ``|other - policy| / 2 s``.
    """
    own, others = _squares(engine, policy), _squares(engine, other)
    noise = math.sqrt(min(own, others) / len(engine))
    return others < own and math.sqrt(_squares(policy, other)) > CLEARLY * noise


def k3(sampled: Sequence[float], other: Sequence[float]) -> float:
    """KL(sampled || other) in nats a token, from tokens drawn from the first.

    Estimator k3 of J. Schulman 2020, "Approximating KL divergence": unbiased and never negative.
    Training reports the same estimator as ``kl_after``.
    """
    deltas = [b - a for a, b in zip(sampled, other, strict=True)]
    return fmean(_k3(delta) for delta in deltas)


def _k3(delta: float) -> float:
    return math.expm1(delta) - delta if delta < 700 else math.inf


def _squares(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))
