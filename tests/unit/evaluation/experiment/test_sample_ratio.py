from itertools import product
from math import prod

import pytest

from babylon.evaluation.experiment.guardrails import sample_ratio


@pytest.mark.parametrize(("challengers", "p"), [(5, 1.0), (8, 112 / 1024), (0, 2 / 1024)])
def test_a_fair_coin_by_hand(challengers: int, p: float) -> None:
    found = sample_ratio([0.5] * 10, challengers)
    assert found.p_value == pytest.approx(p)
    assert (found.champion, found.challenger, found.expected) == (10 - challengers, challengers, 5)
    assert not found.broken


def test_agents_with_shares_of_their_own_against_every_outcome_there_is() -> None:
    shares = [0.05, 0.05, 0.25, 0.25, 0.25, 0.5]
    chances = [0.0] * (len(shares) + 1)
    for dealt in product((0, 1), repeat=len(shares)):
        chances[sum(dealt)] += prod(p if z else 1 - p for p, z in zip(shares, dealt, strict=True))
    for count, chance in enumerate(chances):
        expected = sum(other for other in chances if other <= chance * 1.000001)
        assert sample_ratio(shares, count).p_value == pytest.approx(expected)


@pytest.mark.parametrize(("challengers", "broken"), [(2500, False), (2600, False), (2650, True)])
def test_a_mismatch_is_found_among_many(challengers: int, broken: bool) -> None:
    """Standard deviation of 5,000 fair coins: 35.4."""
    assert sample_ratio([0.5] * 5000, challengers).broken is broken


def test_a_sample_ratio_without_agents_is_not_broken() -> None:
    found = sample_ratio([], 0)
    assert (found.expected, found.p_value, found.broken) == (0, 1, False)
