import math

import numpy as np
import pytest

from babylon.evaluation.arena.confidence import (
    Interval,
    can_reach,
    confidence_sequence,
    paired_difference,
)

BUDGET, BATCH = 1024, 128


def test_the_interval_of_paired_differences() -> None:
    """Differences 1, 2, 3, 4: mean 2.5, standard deviation 1.291, half width 1.96 * 1.291 / 2."""
    interval = paired_difference([0, 0, 0, 0], [1, 2, 3, 4])
    assert interval.mean == 2.5
    assert (interval.low, interval.high) == pytest.approx((2.5 - 1.2652, 2.5 + 1.2652), abs=1e-3)


def test_pairing_removes_what_the_scenarios_have_in_common() -> None:
    scenarios = [-500.0, 0.0, 500.0, 900.0]
    assert paired_difference(scenarios, [s + 10 for s in scenarios]) == Interval(10, 10, 10)


def test_the_sequence_by_hand() -> None:
    """t = t* = 4, alpha 0.05: t rho² = 5.9915 + log(6.9915) = 7.9362, so the width is
    sqrt(2 * 8.9362 / (4 * 7.9362) * log(sqrt(8.9362) / 0.05)) = 1.5175 standard deviations."""
    interval = confidence_sequence([1, 2, 3, 4], tightest=4)
    assert interval.mean == 2.5
    assert interval.high - 2.5 == pytest.approx(1.5175 * math.sqrt(5 / 3), abs=1e-3)
    assert interval.low - 2.5 == pytest.approx(-(interval.high - 2.5))


def test_the_sequence_is_tightest_where_it_is_told_to_be() -> None:
    differences = np.tile([1.0, -1.0], 500)
    widths = {t: confidence_sequence(differences, tightest=t).high for t in (10, 1000, 100_000)}
    assert min(widths, key=lambda t: widths[t]) == 1000


def test_looking_often_fools_an_ordinary_interval_and_not_the_sequence() -> None:
    """Skewed differences of mean zero, looked at eight times: who says that there is one?"""
    random = np.random.default_rng(0)
    sequence = ordinary = 0
    for _ in range(400):
        differences = random.exponential(100.0, BUDGET) - 100.0
        looks = [differences[:end] for end in range(BATCH, BUDGET + 1, BATCH)]
        sequence += any(_off(confidence_sequence(look, tightest=BUDGET / 4)) for look in looks)
        ordinary += any(_off(paired_difference(np.zeros(len(look)), look)) for look in looks)
    assert sequence / 400 < 0.05 < 0.1 < ordinary / 400


@pytest.mark.parametrize(("gain", "hope"), [(-50.0, False), (1.5, False), (2.0, True)])
def test_a_match_is_given_up_when_the_rest_can_hardly_decide_it(gain: float, hope: bool) -> None:
    """After 1024 of 2048 differences of deviation 100 the mean of all is theirs, give or take
    2.33 * 100 sqrt(1/1024 - 1/2048) = 5.14, and has to be above 3.127 * 100 / sqrt(2048) = 6.91."""
    differences = np.tile([gain - 100.0, gain + 100.0], 512)
    assert can_reach(differences, tightest=512, budget=2048) is hope


def _off(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0
