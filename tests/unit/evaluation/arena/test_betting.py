import math

import numpy as np
import pytest

from babylon.evaluation.arena.betting import (
    CERTAIN,
    Differences,
    Floats,
    can_reach,
    log_wealth,
    sequence,
)

BUDGET = 2048


def bounded(values: Floats, limit: float = 1800.0) -> Differences:
    limits = np.full(values.shape, limit)
    return Differences(values, limits, limits)


def test_the_first_bet_by_hand() -> None:
    """The prior deviation is 1800 / 8 = 225; the gamblers' sample sizes are 2048, 512 and 128."""
    (wealth,) = log_wealth(bounded(np.array([100.0])), BUDGET)
    bets = [min(math.sqrt(2 * CERTAIN / (n * 225**2)), 0.9 / 1800) for n in (2048, 512, 128)]
    shares = zip((0.6, 0.25, 0.15), bets, strict=True)
    assert wealth == pytest.approx(math.log(sum(s * (1 + 100 * bet) for s, bet in shares)))


@pytest.mark.parametrize("share", [0.02, 0.01, 0.005])
def test_rare_losses_that_cancel_small_gains_are_believed_in_few_gates(share: float) -> None:
    """A normal sequence believes most of them: the loss is often not seen yet."""
    random = np.random.default_rng(0)
    loses = random.random((2000, BUDGET)) < share
    values = np.where(loses, -1000.0, 1000 * share / (1 - share))
    believed = log_wealth(bounded(values), BUDGET) >= CERTAIN
    assert believed.any(axis=1).mean() <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 2000)


def test_the_mean_lies_in_the_sequence_at_all_looks_together() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        values = random.exponential(100.0, BUDGET) - 100.0
        for end in range(128, BUDGET + 1, 256):
            interval = sequence(bounded(values[:end]), BUDGET)
            assert interval.low <= 0 <= interval.high
            assert interval.low <= interval.mean <= interval.high


def test_the_sequence_excludes_zero_exactly_when_the_gambler_is_believed() -> None:
    random = np.random.default_rng(2)
    for gain in (0.0, 5.0, 15.0, 25.0):
        differences = bounded(random.normal(gain, 150.0, 1024))
        certain = log_wealth(differences, BUDGET)[-1] >= CERTAIN
        assert (sequence(differences, BUDGET).low > -1e-3) == certain


def test_gains_beyond_the_bound_earn_no_more_than_the_bound() -> None:
    wild, cut = (bounded(np.array([gain, 10.0])) for gain in (1e9, 1800.0))
    assert np.array_equal(log_wealth(wild, BUDGET), log_wealth(cut, BUDGET))


def test_a_loss_beyond_the_bound_is_never_made_up_for() -> None:
    values = np.r_[-1e6, np.full(1000, 500.0)]
    assert log_wealth(bounded(values), BUDGET)[-1] < CERTAIN
    assert sequence(bounded(values), BUDGET).low < 0
    assert log_wealth(bounded(np.r_[-1800.0, values[1:]]), BUDGET)[-1] >= CERTAIN


def test_a_match_is_given_up_when_the_rest_can_hardly_decide_it() -> None:
    tiled = {gain: np.tile([gain - 100.0, gain + 100.0], 800) for gain in (-50.0, 0.0, 6.0)}
    hopes = {gain: can_reach(bounded(values), BUDGET) for gain, values in tiled.items()}
    assert hopes == {-50.0: False, 0.0: False, 6.0: True}
    assert not can_reach(bounded(np.full(BUDGET, 50.0)), BUDGET)  # nothing is left to play
    assert can_reach(bounded(np.array([-500.0])), BUDGET)  # one world says nothing


def test_a_match_is_not_given_up_before_rare_wins_can_show() -> None:
    """One world in fifty may pay for all others: 32 and 128 worlds often have none."""
    for worlds, hope in ((32, True), (128, True), (1900, False)):
        assert can_reach(bounded(np.tile([-1.0, -3.0], worlds // 2)), BUDGET) is hope
