import pytest

from babylon.evaluation.arena.confidence import Interval, paired_difference, standard_errors


def test_the_interval_of_paired_differences() -> None:
    """Differences 1, 2, 3, 4: mean 2.5, standard deviation 1.291, half width 1.96 * 1.291 / 2."""
    interval = paired_difference([0, 0, 0, 0], [1, 2, 3, 4])
    assert interval.mean == 2.5
    assert (interval.low, interval.high) == pytest.approx((2.5 - 1.2652, 2.5 + 1.2652), abs=1e-3)


def test_pairing_removes_what_the_scenarios_have_in_common() -> None:
    scenarios = [-500.0, 0.0, 500.0, 900.0]
    assert paired_difference(scenarios, [s + 10 for s in scenarios]) == Interval(10, 10, 10)


def test_the_normal_sequence_by_hand() -> None:
    """t = t*, alpha 0.05: t rho² = 5.9915 + log(6.9915) = 7.9362, so the width is
    sqrt(2 * 8.9362 / 7.9362 * log(sqrt(8.9362) / 0.05)) = 3.035 standard errors."""
    assert standard_errors(1.0) == pytest.approx(3.035, abs=1e-3)
    assert min(map(standard_errors, (0.01, 1.0, 100.0))) == standard_errors(1.0)
