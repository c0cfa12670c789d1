from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from babylon.core.home import Home
from babylon.core.learning_settings import TrainingSettings
from babylon.evaluation.arena import held_out
from babylon.evaluation.arena.held_out import off_policy


def groups(*sizes: int) -> list[str]:
    return [f"s{number}" for number, size in enumerate(sizes) for _ in range(size)]


def test_difference_and_effective_sample_size_by_hand() -> None:
    """Half of 80 earned $10 more than the others of their scenario, and the challenger plays them
    three times as often: it earns 5 * (3 - 1) / (3 + 1) more than the
    players, times 10 / 9, because the mean is that of the others. The effective sample size is
    (40 * 3 + 40)² / (40 * 9 + 40) = 64. All scenarios are alike, so the interval is what none of
    the eight showed, $1,000 in log(100) / 8 of the cases for a quarter of the play, and the
    plays' own error: 40 * (3 * 25 / 9 / 160)² + 40 * (25 / 3 / 160)² times t² at seven."""
    pnl = np.tile([110.0, 100.0], 40)
    check = off_policy(np.tile([np.log(3.0), 0.0], 40), pnl, groups(*[10] * 8))
    assert check.difference == pytest.approx(2.5 * 10 / 9)
    assert (check.trajectories, check.ess) == (80, pytest.approx(64.0))
    assert check.low is not None and check.high is not None
    unseen = 1000 * np.log(100) / 8 / 4
    error = np.sqrt(40 * (3 * 25 / 9 / 160) ** 2 + 40 * (25 / 3 / 160) ** 2)
    assert check.high - check.low == pytest.approx(2 * (unseen + 3.500 * error), rel=1e-3)


def test_a_challenger_that_plays_alike_earns_the_same() -> None:
    pnl = np.random.default_rng(0).normal(0, 100, 60)
    check = off_policy(np.full(60, -3.0), pnl, groups(*[6] * 10))
    assert check.difference == pytest.approx(0, abs=1e-9) and check.ess == pytest.approx(60)


def test_a_preference_for_an_easy_scenario_earns_nothing() -> None:
    """The challenger prefers the scenario where everybody earned more: that is no skill."""
    pnl = np.repeat([0.0, 500.0], 40)
    check = off_policy(np.repeat([0.0, 1.0], 40), pnl, groups(*[10] * 8))
    assert check.difference == pytest.approx(0, abs=1e-9)


def test_a_challenger_that_prefers_what_lost_is_vetoed() -> None:
    random = np.random.default_rng(0)
    pnl = random.normal(0, 100, 400)
    check = off_policy(-pnl / 100, pnl, groups(*[8] * 50))
    assert check.veto and check.difference is not None and check.difference < -50


@pytest.mark.parametrize(
    ("ratios", "scenarios", "problem"),
    [
        (np.zeros(20), groups(10, 10), "ESS 20.0 of 20 held-out trajectories; 30 needed"),
        (np.r_[np.zeros(199), 30.0], groups(100, 100), "too small: ESS 1"),
        (np.zeros(40), [str(number) for number in range(40)], "no two held-out trajectories"),
        (np.zeros(71), groups(*[10] * 7, 1), "held-out play of 7 scenarios; 8 needed"),
    ],
)
def test_too_little_play_is_refused(ratios: np.ndarray, scenarios: list[str], problem: str) -> None:
    check = off_policy(ratios, np.arange(len(ratios), dtype=float), scenarios)
    assert check.problem is not None and problem in check.problem
    assert check.difference is None and not check.veto


def test_a_weight_counts_at_most_the_root_of_n_times_the_mean() -> None:
    """One of 100 with all the weight is cut from 100 times the mean to 10 times it."""
    ratios = np.r_[50.0, np.zeros(99)]
    check = off_policy(ratios, np.arange(100.0), groups(100))
    assert check.ess == pytest.approx(1.0, abs=0.01) and check.problem is not None
    mild = np.r_[np.log(100.0), np.zeros(99)]  # 100 of 199: cut to 10 * 1.99
    cut = off_policy(mild, np.arange(100.0), groups(100))
    assert cut.ess == pytest.approx((19.9 + 99) ** 2 / (19.9**2 + 99), rel=1e-3)


def test_the_estimate_finds_the_value_of_a_policy_that_never_played() -> None:
    """Players choose arm 1 with 0.5, the challenger with 0.8; arm 1 earns $20 more: +$6."""
    random = np.random.default_rng(3)
    arm = random.random(4000) < 0.5
    pnl = 20.0 * arm + random.normal(0, 50, 4000)
    ratios = np.where(arm, np.log(0.8 / 0.5), np.log(0.2 / 0.5))
    check = off_policy(ratios, pnl, groups(*[8] * 500))
    assert check.low is not None and check.high is not None
    assert check.low < 6 < check.high
    assert check.high - check.low < 12


def test_recorded_play_promotes_what_surely_gains_and_nothing_else() -> None:
    """A policy that doubles the chance of the better of two replies, and an equal one."""
    random = np.random.default_rng(0)
    wins = random.random(2000) < 0.5
    pnl = np.where(wins, 400.0, -400.0)
    scenarios = [str(number // 8) for number in range(2000)]
    better = off_policy(np.where(wins, np.log(1.6), np.log(0.4)), pnl, scenarios)
    assert better.gain and better.low is not None and better.low > 0
    assert not off_policy(np.zeros(2000), pnl, scenarios).gain
    older = off_policy(np.where(wins, np.log(1.6), np.log(0.4)), pnl, scenarios, wins < 0)
    assert not older.gain and older.low == better.low  # the champion did not play it
    believed = 0
    for _ in range(200):  # weights with a long tail, of mean one, that say nothing about the P&L
        weights = random.lognormal(-0.5, 1.0, 400)
        believed += off_policy(np.log(weights), random.choice(pnl, 400), scenarios[:400]).gain
    assert believed <= 5 + 4


def test_plays_of_one_scenario_are_one_piece_of_evidence() -> None:
    """Agents with one seed play alike: four copies of two plays prove no more than the two do."""
    random, believed = np.random.default_rng(1), 0
    scenarios = groups(*[8] * 50)
    for _ in range(200):
        weights = np.repeat(random.choice([0.4, 1.6], 100), 4)
        pnl = np.repeat(random.choice([-400.0, 400.0], 100), 4)
        believed += off_policy(np.log(weights), pnl, scenarios).gain
    assert believed <= 5 + 4


@pytest.mark.parametrize(("markets", "plays"), [(8, 64), (16, 32), (64, 8)])
def test_agents_of_one_market_are_no_independent_witnesses(markets: int, plays: int) -> None:
    """A fair coin decides each market. The challenger bets on it more often, and loses nothing."""
    random, vetoed = np.random.default_rng(2), 0
    for _ in range(400):
        ends = np.repeat(random.choice([-100.0, 100.0], markets), plays)
        buys = random.random(markets * plays) < 0.5
        ratios = np.log(np.where(buys, 0.7, 0.3) / 0.5)
        vetoed += off_policy(ratios, np.where(buys, ends, 0.0), groups(*[plays] * markets)).veto
    assert vetoed <= 2 + 4  # 0.5 % of 400 are allowed on average


@pytest.mark.parametrize("share", [0.2, 0.05, 0.01])
@pytest.mark.parametrize(("markets", "plays"), [(8, 16), (32, 8), (128, 4)])
def test_rare_wins_that_were_not_seen_are_no_loss(markets: int, plays: int, share: float) -> None:
    """A market in five, 20 or 100 pays $1,000 and the others cost as much on the average."""
    random, vetoed = np.random.default_rng(4), 0
    for _ in range(200):
        won = np.repeat(random.random(markets) < share, plays)
        buys = random.random(markets * plays) < 0.5
        pnl = np.where(buys, np.where(won, 1000.0, -1000 * share / (1 - share)), 0.0)
        ratios = np.log(np.where(buys, 0.9, 0.1) / 0.5)
        vetoed += off_policy(ratios, pnl, groups(*[plays] * markets)).veto
    assert vetoed <= 2 + 4  # 1 % of 200 are allowed on average


async def test_quarters_of_an_hour_that_were_trained_on_prove_no_gain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def play(*_: object) -> tuple[list[SimpleNamespace], str]:
        windows = ("2025-11-14T09:15", "2025-11-14T09:45", "2025-11-14T10:45")
        return [SimpleNamespace(window_id=name) for name in windows], ""

    async def trained_on(*_: object) -> frozenset[str]:
        return frozenset({"2025-11-14T09:15", "2025-11-14T09:30+late"})

    monkeypatch.setattr(held_out, "held_out_play", play)

    async def lengths(_: object) -> dict[str, int]:
        return dict.fromkeys(await trained_on(), 15)

    monkeypatch.setattr(held_out, "windows_trained_into", trained_on)
    monkeypatch.setattr(held_out, "window_lengths", lengths)
    monkeypatch.setattr(held_out, "_check", lambda *given: given[-1].tolist())
    store: Any = SimpleNamespace(home=Home.at(tmp_path))
    trained: Any = SimpleNamespace(checkpoint_uri="x", policy_version=1, parent_version=0)
    found: Any = await held_out.held_out_check(store, trained, TrainingSettings())
    assert found == [False, False, True]
