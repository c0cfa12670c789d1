"""The benchmark of scorers keeps its word: tau, the known windows, and what counts as failure."""

from statistics import fmean

import pytest

from babylon.scoring.judge.condense import condense
from benchmarks import judge
from benchmarks.judge import WindowResult, as_line, kendall_tau, summarise, targets
from benchmarks.judge_windows import known_window
from benchmarks.loopback_judge import Mind, last_pnl


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # a tie in one: 2 of 2 agree, of 2 and 3 untied
        ([1, 1, 1], [1, 2, 3], 0.0),  # ranks nothing
    ],
)
def test_kendall_tau_by_hand(one, other, tau):
    assert kendall_tau(one, other) == pytest.approx(tau)


@pytest.mark.parametrize("size", [4, 24])
def test_windows_are_ordered_by_skill_in_the_mean_and_told_apart_to_the_cent(size):
    windows = [known_window(size, seed) for seed in range(8)]
    assert fmean(kendall_tau(w.skill, w.profit_usd) for w in windows) > 0.3
    assert all(len(set(window.profit_usd)) == size for window in windows)
    assert len({window.skill for window in windows}) == 8  # listed in random order
    assert known_window.__wrapped__(size, 3) == known_window(size, 3)


def test_the_judge_finds_the_true_profit_in_our_text_of_a_trajectory():
    window = known_window(4, 0)
    shown = [last_pnl(condense(judged, (), 10**6)) for judged in window.judged]
    assert shown == list(window.profit_usd)


def result(scorer, seed, tau, tokens=100, failure=""):
    return WindowResult(
        scorer=scorer,
        condition="noise + position",
        size=4,
        seed=seed,
        tau=tau,
        calls=1,
        tokens=tokens,
        usd=0.0,
        wall_s=0.0,
        failure=failure,
    )


def test_a_failed_window_counts_as_failed_and_as_tau_zero_beside_arts():
    arts = [result("art-ruler", 0, 0.5), result("art-ruler", 1, 0.7)]
    row = summarise([result("ruler", 0, 1.0, 150), result("ruler", 1, 0.0, 150, "no")], arts)
    assert (row.failed, row.windows, row.tau) == (1, 2, 0.5)
    assert (row.gain, row.tokens_ratio) == (pytest.approx(-0.1), 1.5)
    assert targets([row]) == {
        "zero_noise_tau_is_1": None,
        "gain_at_least_0.15": False,
        "tokens_at_most_1.6_times": True,
    }
    assert "| ruler | 0.500 | -0.10 ± " in as_line(row)


async def test_without_noise_the_judge_ranks_as_the_truth_and_its_faults_are_survived():
    found = await judge.judge_once("ruler", "zero noise", 8, 0)
    assert (found.tau, found.failure) == (1.0, "")
    assert found.calls > 1 and found.tokens > 0
    faulty = await judge.judge_once("ruler", "noise + faults", 8, 1)
    assert faulty.failure == "" and faulty.calls >= found.calls


async def test_a_window_that_cannot_be_scored_says_why(monkeypatch):
    monkeypatch.setitem(judge.CONDITIONS, "deaf", Mind(faults={"malformed": 1.0}))
    found = await judge.judge_once("ruler", "deaf", 4, 0)
    assert found.tau == 0.0 and "no usable judgment" in found.failure and found.tokens > 0
