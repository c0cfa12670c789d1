from random import Random

import numpy as np
import pytest

from babylon.scoring.judge import calibrate as calibration
from babylon.scoring.judge.calibrate import (
    Estimate,
    ScoreObservation,
    calibrate,
    fit_preferences,
    unstable,
)
from babylon.scoring.judge.judge_window import mixed_blocks, ring_blocks


def observe(blocks, score):
    """``score(request, item, place)`` of every trajectory of every block."""
    return [
        ScoreObservation(
            request=r, item=i, place=at / (len(block) - 1), score=score(r, i, at / (len(block) - 1))
        )
        for r, block in enumerate(blocks)
        for at, i in enumerate(block)
    ]


def estimate(scores, error):
    scores = np.array(scores)
    return Estimate(scores=scores, errors=np.full(len(scores), error), reliability=1.0)


def test_by_hand_two_requests_that_agree_give_their_scores_back():
    worth = [0.2, 0.4, 0.9]
    seen = observe([(0, 1, 2), (2, 1, 0)], lambda r, i, p: worth[i])
    found = calibrate(seen, 3, together=True)
    assert found.scores == pytest.approx(worth, abs=1e-3)
    assert found.reliability > 0.999
    assert (found.high - found.low).max() < 1e-3


def test_generosity_of_requests_and_bias_of_places_are_taken_out():
    random = Random(0)
    worth = [i / 23 for i in range(24)]
    blocks = ring_blocks(24, 6, random)
    blocks += [block[::-1] for block in blocks]
    generous = [random.uniform(-0.1, 0.1) for _ in blocks]
    seen = observe(blocks, lambda r, i, p: 0.3 + 0.3 * worth[i] + generous[r] - 0.2 * p)
    found = calibrate(seen, 24, together=True)
    assert list(np.argsort(found.scores)) == list(range(24))


def test_intervals_hold_the_truth_about_every_other_time():
    inside = []
    for seed in range(30):
        random = Random(seed)
        worth = [random.uniform(0.3, 0.7) for _ in range(12)]
        blocks = [block for _ in range(3) for block in ring_blocks(12, 6, random)]
        seen = observe(blocks, lambda r, i, p, w=worth, g=random: w[i] + g.gauss(0, 0.1))
        found = calibrate(seen, 12, together=True)
        inside += [lo <= w <= hi for lo, w, hi in zip(found.low, worth, found.high, strict=True)]
    assert 0.35 < np.mean(inside) < 0.65


@pytest.mark.parametrize(("tails", "most"), [(2.0, 0.9), (1e6, 1.02)], ids=["heavy", "normal"])
def test_a_misreading_moves_a_worth_little_and_normal_noise_costs_nothing(monkeypatch, tails, most):
    errors = {}
    for model in (calibration._TAILS, 1e9):  # Student's noise, and normal noise
        monkeypatch.setattr(calibration, "_TAILS", model)
        missed = []
        for seed in range(60):
            random = Random(seed)
            worth = np.array([random.uniform(0.2, 0.8) for _ in range(8)])

            def score(r, i, p, random=random, worth=worth):
                return (
                    worth[i]
                    + 0.1 * random.gauss() / random.gammavariate(tails / 2, 2 / tails) ** 0.5
                )

            blocks = [tuple(random.sample(range(8), 8)) for _ in range(5)]
            found = calibrate(observe(blocks, score), 8, together=True)
            ranks = np.argsort(np.argsort(found.scores)), np.argsort(np.argsort(worth))
            missed.append(np.abs(ranks[0] - ranks[1]).mean())
        errors[model] = np.mean(missed)
    assert errors[8.0] < most * errors[1e9]


def test_a_judge_that_says_the_same_of_all_leaves_them_equal():
    seen = observe([(0, 1, 2), (2, 1, 0)], lambda r, i, p: 0.5)
    assert calibrate(seen, 3, together=True).scores == pytest.approx([0.5] * 3)


def test_scores_beyond_the_unit_are_squeezed_without_changing_their_order():
    seen = observe([(0, 1, 2)] * 2, lambda r, i, p: (0.0, 0.5, 1.0)[i])
    found = calibrate(seen, 3, together=True)
    assert found.low.min() >= 0 and found.high.max() <= 1
    assert list(np.argsort(found.scores)) == [0, 1, 2]


def test_unstable_is_what_overlaps_a_neighbour():
    assert unstable(estimate([0.1, 0.9, 0.85, 0.5], 0.015)) == [1, 2]
    assert unstable(estimate([0.1, 0.9], 0.015)) == []


def test_preferences_without_contradiction_are_all_told_apart():
    wins = [(i, j, (i + j) % 2 == 0) for i in range(8) for j in range(i)]
    found = fit_preferences(wins, 8)
    assert list(np.argsort(found.scores)) == list(range(8))
    assert len(set(found.scores)) == 8


def test_an_advantage_of_being_first_is_no_merit():
    """0 and 1 are equals; whoever is listed first wins."""
    wins = [(0, 1, True), (1, 0, True)] * 4
    found = fit_preferences(wins, 2)
    assert found.scores == pytest.approx([0.5, 0.5])


def test_wins_and_losses_that_cancel_out_are_a_tie():
    wins = [(0, 1, True), (0, 1, False), (1, 0, True), (1, 0, False), (0, 2, True), (1, 2, False)]
    found = fit_preferences(wins, 3)
    assert found.scores[0] == pytest.approx(found.scores[1])
    assert found.scores[0] > found.scores[2]


@pytest.mark.parametrize("items", [1, 2, 6, 7, 11, 24, 50, 64])
def test_the_ring_shows_everyone_shares_anchors_and_is_connected(items):
    blocks = ring_blocks(items, 6, Random(1))
    assert max(map(len, blocks)) <= 6
    assert {item for block in blocks for item in block} == set(range(items))
    assert sum(map(len, blocks)) <= 1.3 * items + 2
    reached = set(blocks[0])
    for _ in blocks:
        for block in blocks:
            reached |= set(block) if reached & set(block) else set()
    assert len(reached) == items


def test_later_blocks_are_mixed_and_list_the_late_ones_first():
    places = {item: [item / 9] for item in range(10)}
    blocks = mixed_blocks(range(10), 6, places, Random(0))
    assert sorted(item for block in blocks for item in block) == list(range(10))
    for block in blocks:
        assert 2 <= len(block) <= 6
        assert list(block) == sorted(block, reverse=True)
