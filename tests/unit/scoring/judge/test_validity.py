"""Trust in a judge, learned from outcomes: judges of known error, in many windows."""

from dataclasses import replace
from random import Random
from statistics import pstdev

import numpy as np
import pytest

from babylon.scoring.judge.calibrate import Estimate
from babylon.scoring.judge.canary_results import PLANTED, CanaryResult
from babylon.scoring.judge.validity import (
    WINDOWS,
    JudgedGroup,
    Trust,
    agreement,
    believe,
    evidence,
    learn,
)


def group(random, size, persistent=0.0, noise=0.0, tails=0, told=True, outcomes=None):
    """A group whose judge errs by ``persistent`` each time, and by ``noise`` once."""
    truth = [random.gauss(0, 0.2) for _ in range(size)]
    opinions = []
    for t in truth:
        steady = random.gauss(0, persistent)
        if tails:
            steady /= random.gammavariate(tails / 2, 2 / tails) ** 0.5
        opinions.append((t if told else 0.0) + steady + random.gauss(0, noise))
    # The estimate of an opinion is shrunk by its reliability, as the fit does it.
    spread = (0.04 if told else 0.0) + persistent**2
    kept = spread / (spread + noise**2) if noise else 1.0
    return truth, JudgedGroup(
        opinions=tuple(kept * one for one in opinions),
        errors=(noise * kept**0.5,) * size,
        outcomes=tuple(1000 * t for t in truth) if outcomes is None else outcomes,
    )


def coverage(persistent, noise, tails=0, size=8):
    inside = []
    for seed in range(4):
        random, history = Random(seed), []
        for window in range(60):
            truth, one = group(random, size, persistent, noise, tails)
            if window >= 20:
                estimate = Estimate(
                    scores=np.array(one.opinions), errors=np.array(one.errors), reliability=1.0
                )
                scores, halves = believe(estimate, learn(history), range(len(truth)))
                exact = np.array(truth) - np.mean(truth)
                inside += list(np.abs(scores - scores.mean() - exact) <= halves)
            history = [*history, one][-WINDOWS:]
    return float(np.mean(inside))


@pytest.mark.parametrize(
    ("persistent", "noise", "tails"),
    [(0.0, 0.1, 0), (0.1, 0.1, 0), (0.18, 0.09, 0), (0.1, 0.02, 2), (0.2, 0.0, 3)],
    ids=["independent", "half", "mostly persistent", "heavy tails", "all persistent"],
)
def test_half_of_the_true_values_lie_in_their_intervals(persistent, noise, tails):
    assert 0.45 <= coverage(persistent, noise, tails) <= 0.55


def test_a_refused_play_leaves_the_unit_of_outcomes_as_it_was():
    random, groups = Random(2), []
    for _ in range(30):
        one = group(random, 4, noise=0.02)[1]
        rest = {name: getattr(one, name)[1:] for name in ("opinions", "errors", "outcomes")}
        groups.append(replace(one, **rest, spread_usd=pstdev(one.outcomes)))
    own = [replace(one, spread_usd=0.0) for one in groups]  # the spread of the rest as the unit
    assert learn(groups).validity > learn(own).validity + 0.03


def test_a_steady_error_shrinks_scores_and_never_turns_their_order():
    random = Random(1)
    clear = learn([group(random, 8)[1] for _ in range(20)])
    partial = learn([group(random, 8, persistent=0.2)[1] for _ in range(20)])
    blind = learn([group(random, 8, persistent=0.2, told=False)[1] for _ in range(20)])
    assert clear.validity > 0.9 and partial.validity == pytest.approx(0.5, abs=0.1)
    assert blind.validity < 0.02
    estimate = Estimate(scores=np.array([0.2, 0.5, 0.9]), errors=np.zeros(3), reliability=1.0)
    scores, halves = believe(estimate, Trust(validity=0.5), [0, 1, 2])
    assert scores.mean() == pytest.approx(estimate.scores.mean())
    assert np.diff(scores) == pytest.approx(0.5 * np.diff(estimate.scores))
    assert (halves > 0).all()


def test_without_a_history_a_judge_is_trusted_neither_fully_nor_not_at_all():
    assert 0.3 < learn([]).validity < 0.9


@pytest.mark.parametrize("size", [4, 8, 24])
def test_a_judge_that_tells_nothing_reaches_the_evidence_in_at_most_one_window_of_twenty(size):
    reached = 0
    for seed in range(10):
        random, history = Random(f"{size}:{seed}"), []
        for _ in range(40):
            history = [*history, group(random, size, persistent=0.2, told=False)[1]][-WINDOWS:]
            reached += evidence(history, []) >= 20
    assert reached <= 0.05 * 400


@pytest.mark.parametrize(("size", "windows"), [(4, 8), (8, 4), (24, 1)])
def test_a_judge_that_tells_much_reaches_it_soon(size, windows):
    random = Random(size)
    history = [group(random, size, persistent=0.08)[1] for _ in range(windows)]
    assert evidence(history, []) >= 20


def test_weak_agreement_is_proved_by_many_windows():
    random = Random(3)
    history = [group(random, 24, persistent=0.5)[1] for _ in range(WINDOWS)]
    found = agreement(history)
    assert found.correlation == pytest.approx(0.37, abs=0.1) and found.low > 0.2
    assert evidence(history, []) >= 20


def test_a_judge_that_turns_blind_loses_its_proof():
    random = Random(4)
    history = [group(random, 8, persistent=0.1)[1] for _ in range(20)]
    assert evidence(history, []) >= 20
    for _ in range(WINDOWS):
        history = [*history, group(random, 8, persistent=0.2, told=False)[1]][-WINDOWS:]
    assert evidence(history, []) < 20


def test_without_outcomes_planted_plays_are_the_evidence():
    equal = [JudgedGroup(opinions=(0.2, 0.8), errors=(0.1,) * 2, outcomes=(0.0,) * 2)]

    def answers(random, worth):
        """One canary a window. ``worth`` is the judge's answer to a better and to a worse one."""
        kinds = [random.choice(PLANTED) for _ in range(WINDOWS)]
        return [CanaryResult(kind=kind, value=worth.get(kind, 0.0)) for kind in kinds]

    told = [answers(Random(seed), {"better": 1.0, "worse": 1.0}) for seed in range(40)]
    assert all(evidence(equal, own) >= 20 for own in told)
    # A taste for the planted form, good or bad, repeats for ever and tells nothing.
    for liked in (1.0, -1.0, 0.4):
        tastes = [answers(Random(seed), {"better": liked, "worse": -liked}) for seed in range(400)]
        assert sum(evidence(equal, own) >= 20 for own in tastes) <= 0.05 * 400
    assert evidence(equal, []) == 1 and agreement(equal) is None


def test_a_constant_judge_shows_no_evidence():
    one = JudgedGroup(opinions=(0.5,) * 4, errors=(0.0,) * 4, outcomes=(1.0, 2.0, 3.0, 4.0))
    assert evidence([one] * 30, []) == 1
