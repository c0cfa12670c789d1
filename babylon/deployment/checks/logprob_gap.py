"""What engine and trainer say of the same tokens, as numbers: pure functions.

``[N]`` are the tokens of all answers, one after the other. Engine and trainer may differ by
rounding alone. In fp32 on a CPU that is 1e-7 nats in the mean and 5e-6 at most, so a thousandth
is generous; with weights rounded to bf16 the demo's policies move by 1e-3 to 4e-3 in the mean and
0.1 at most, and larger models, in whose text there are unlikelier tokens, by several times that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from babylon.core.settings import Engine

CLEARLY = 6.0  # times the noise of the sum: nearer by half of that is three standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far an engine's logprobs may lie from the trainer's, nats a token."""

    mean: float
    most: float


FINE = Tolerance(mean=1e-3, most=1e-2)  # fp32 in engine and trainer
COARSE = Tolerance(mean=3e-2, most=2.0)  # the engine computes in 16 bits


def tolerance(engine: Engine, vllm_args: str) -> Tolerance:
    """The embedded engine computes in fp32, vLLM only where it is told to: left to itself it makes
    16 bits also of a checkpoint in fp32."""
    if engine == "embedded":
        return FINE
    given = vllm_args.replace("=", " ").split()
    types = [value for name, value in pairwise(given) if name == "--dtype"]
    return FINE if types[-1:] in (["float32"], ["float"]) else COARSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Distances of two lists of logprobs, nats a token."""

    mean: float
    most: float

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> "Gap":
        gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
        return cls(mean=fmean(gaps), most=max(gaps))

    def within(self, tolerance: Tolerance) -> bool:
        return self.mean <= tolerance.mean and self.most <= tolerance.most  # NaN is not


def is_rather(engine: Sequence[float], policy: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the engine's logprobs are the other policy's rather than the policy's own.

    They are nearer to it (sum of squares), and the two policies differ by so much that rounding
    cannot be why: with independent errors of standard deviation s the sum of squares prefers the
    wrong policy when a normal variable exceeds |other - policy| / 2 s.
    """
    own, others = _squares(engine, policy), _squares(engine, other)
    noise = math.sqrt(min(own, others) / len(engine))
    return others < own and math.sqrt(_squares(policy, other)) > CLEARLY * noise


def k3(sampled: Sequence[float], other: Sequence[float]) -> float:
    """KL(sampled || other), nats a token, from tokens that were drawn from the first.

    J. Schulman 2020, "Approximating KL divergence", estimator k3: unbiased and never negative;
    the same that training reports as ``kl_after``.
    """
    deltas = [b - a for a, b in zip(sampled, other, strict=True)]
    return fmean(_k3(delta) for delta in deltas)


def _k3(delta: float) -> float:
    return math.expm1(delta) - delta if delta < 700 else math.inf


def _squares(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))
