"""Engine and trainer by their numbers: rounding is forgiven, other weights are not."""

from math import exp, inf, log, nan
from random import Random

import pytest

from babylon.core.settings import Engine
from babylon.deployment.checks.logprob_gap import (
    COARSE,
    FINE,
    FOUR_BITS,
    Gap,
    Tolerance,
    is_nearer_to_other,
    k3,
    tolerance,
)


def _noisy(scores: list[float], deviation: float, random: Random) -> list[float]:
    return [score + random.gauss(0, deviation) for score in scores]


def test_the_gap_is_the_mean_and_the_largest_distance() -> None:
    gap = Gap.of([0.0, -1.0, -2.0], [0.0, -1.5, -1.0])
    assert (gap.mean, gap.most) == (0.5, 1.0)
    assert gap.within(COARSE) is False
    assert Gap(mean=1e-4, most=5e-3).within(FINE)
    assert not Gap(mean=1e-4, most=0.02).within(FINE)
    assert not Gap(mean=nan, most=0.0).within(COARSE)


@pytest.mark.parametrize(("noise", "apart"), [(1e-7, 1e-5), (1e-7, 0.3), (5e-3, 4e-3), (5e-3, 0.3)])
def test_an_engine_with_other_weights_is_found_below_its_noise(noise: float, apart: float) -> None:
    random = Random(1)
    policy = [-abs(random.gauss(0, 1)) for _ in range(500)]
    other = _noisy(policy, apart, random)
    assert is_nearer_to_other(_noisy(other, noise, random), policy, other)
    assert not is_nearer_to_other(_noisy(policy, noise, random), policy, other)


def test_policies_that_differ_by_less_than_rounding_are_never_confused() -> None:
    """A thousand honest engines in bf16, beside a champion that is nearly the same policy."""
    random = Random(2)
    policy = [-abs(random.gauss(0, 1)) for _ in range(100)]
    other = _noisy(policy, 1e-3, random)
    assert not any(
        is_nearer_to_other(_noisy(policy, 1e-2, random), policy, other) for _ in range(1000)
    )
    assert not is_nearer_to_other(policy, policy, policy)


def test_k3_is_the_kl_divergence_in_expectation_and_never_negative() -> None:
    p, q = [0.7, 0.2, 0.1], [0.2, 0.5, 0.3]
    exact = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
    estimate = sum(a * k3([log(a)], [log(b)]) for a, b in zip(p, q, strict=True))
    assert estimate == pytest.approx(exact)
    assert k3([-1.0], [-1.0 + 1e-9]) >= 0
    assert k3([log(0.5)], [log(0.5) - 10]) == pytest.approx(9 + exp(-10))
    assert k3([-800.0], [0.0]) == inf


@pytest.mark.parametrize(
    ("engine", "arguments", "precision", "allowed"),
    [
        ("embedded", "", "fp32", FINE),
        ("vllm", "", "fp32", COARSE),
        ("vllm", "--dtype float32 --max-model-len 512", "fp32", FINE),
        ("vllm", "--dtype=float32", "fp32", FINE),
        ("vllm", "--dtype float32 --dtype bfloat16", "fp32", COARSE),
        ("embedded", "", "bf16", COARSE),
        ("vllm", "--dtype float32", "nf4", FOUR_BITS),
    ],
)
def test_the_tolerance_fits_the_dtypes(
    engine: Engine, arguments: str, precision: str, allowed: Tolerance
) -> None:
    assert tolerance(engine, arguments, precision) == allowed
