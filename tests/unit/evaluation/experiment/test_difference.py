import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.evaluation.arena.confidence import standard_errors
from babylon.evaluation.experiment.agent_outcomes import (
    AgentOutcomes,
    Exposure,
    agent_outcomes,
    outcomes_of_plays,
)
from babylon.evaluation.experiment.difference import TIGHTEST, difference, student
from babylon.evaluation.experiment.review_records import Comparison

ARM = st.lists(st.floats(-1000, 1000).map(lambda x: round(x, 3)), min_size=2, max_size=12)


def arms(champion: list[float], challenger: list[float], stage: int = 0) -> AgentOutcomes:
    """One play for each of so many agents."""
    outcomes = [*champion, *challenger]
    return agent_outcomes(
        [
            Exposure(unit=f"agent-{i}", stage=stage, challenger=i >= len(champion))
            for i in range(len(outcomes))
        ],
        np.array(outcomes),
    )


def compare(outcomes: AgentOutcomes, *, shares: bool = False) -> Comparison:
    found = difference(outcomes, shares=shares)
    assert found is not None
    return found


def test_two_means_by_hand() -> None:
    """Variances 1 and 4, of both together 10 / 4 = 2.5, which the first is not believed to be
    below: the difference has 2.5 / 3 + 4 / 3 = 2.1667, with Satterthwaite's 2.1667² / ((0.8333² +
    1.3333²) / 2) = 3.798 degrees of freedom. What there is to know: 6 agents, half of each kind."""
    found = compare(arms([1, 2, 3], [4, 6, 8]))
    assert (found.champion, found.challenger, found.difference) == pytest.approx((2, 6, 4))
    assert (found.champion_agents, found.challenger_agents) == (3, 3)
    assert found.information == pytest.approx(6)
    half = math.sqrt(2.16667) * student(standard_errors(6 / TIGHTEST), 3.7978)
    assert (found.low, found.high) == pytest.approx((4 - half, 4 + half), rel=1e-3)


def test_what_is_at_stake_lowers_the_low_end_by_what_the_smaller_arm_may_have_missed() -> None:
    outcomes = arms([1, 2] * 30, [4, 6] * 10)
    plain, careful = difference(outcomes), difference(outcomes, at_stake=1000)
    assert plain and careful
    assert plain.low - careful.low == pytest.approx(careful.unseen)
    assert careful.unseen == pytest.approx(1000 * math.log(100) / 20)
    assert (plain.difference, plain.high) == (careful.difference, careful.high)


@pytest.mark.parametrize(
    ("freedom", "quantile", "within"),
    [(3, 3.1824, 0.02), (10, 2.2281, 0.001), (30, 2.0423, 0.001), (1e9, 1.9600, 0.0001)],
)
def test_student_quantiles_match_tables(freedom: float, quantile: float, within: float) -> None:
    assert student(1.959964, freedom) == pytest.approx(quantile, rel=within)


@given(ARM, ARM, st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_the_unit_and_the_zero_of_money_do_not_matter(
    champion: list[float], challenger: list[float], shift: float, scale: float
) -> None:
    one = compare(arms(champion, challenger))
    other = compare(
        arms([scale * x + shift for x in champion], [scale * x + shift for x in challenger])
    )
    close = dict(rel=1e-6, abs=1e-4 * (scale + 1))
    assert other.difference == pytest.approx(scale * one.difference, **close)
    assert other.high - other.low == pytest.approx(scale * (one.high - one.low), **close)


@given(ARM, ARM)
def test_the_arms_are_treated_alike(champion: list[float], challenger: list[float]) -> None:
    one, other = compare(arms(champion, challenger)), compare(arms(challenger, champion))
    assert (one.difference, one.low, one.high) == pytest.approx(
        (-other.difference, -other.high, -other.low), rel=1e-6, abs=1e-6
    )


def test_history_takes_away_what_it_explains_and_never_shifts_the_arms() -> None:
    random = np.random.default_rng(0)
    skill = random.normal(0, 100, 80)
    outcome = skill + random.normal(0, 10, 80)
    outcomes = arms(list(outcome[:40]), list(outcome[40:] + 5))
    with_history = compare(replace(outcomes, before=skill + random.normal(0, 10, 80)))
    assert with_history.explained > 0.9
    assert with_history.low < 5 < with_history.high
    assert with_history.high - with_history.low < 0.4 * (
        compare(outcomes).high - compare(outcomes).low
    )


def test_an_agent_without_history_is_not_adjusted() -> None:
    """Its own difference from the mean of the others is what an adjustment would need."""
    outcomes = arms([1.0, 2, 3, 4], [2.0, 4, 5, 7])
    assert compare(replace(outcomes, before=np.full(8, 50.0))) == compare(outcomes)
    before = np.array([1.0, 2, 3, 4, 1, 2, 3, np.nan])
    known = before[:7].mean()
    half = compare(replace(outcomes, before=before))
    filled = compare(replace(outcomes, before=np.append(before[:7], known)))
    assert half == filled


def test_play_at_good_times_does_not_count_for_the_arm_that_plays_then() -> None:
    """Everybody earns 0 in the first stage and 100 in the second, in which challengers are five
    times as many: means over all plays would differ by some 50."""
    early = arms([-1, 0, 1] * 12, [-1, 1] * 3)
    late = arms([99, 100, 101] * 6, [99, 101] * 12, stage=1)
    both = AgentOutcomes(
        **{
            name: np.concatenate([getattr(early, name), getattr(late, name)])
            for name in ("stage", "challenger", "mean", "plays", "spread", "before")
        },
        unit=np.concatenate([early.unit, late.unit + 100]),
    )
    found = compare(both)
    assert found.difference == pytest.approx(0, abs=1e-9)
    assert -5 < found.low < 0 < found.high < 5


def test_a_stage_weighs_as_much_as_was_played_in_it() -> None:
    """Differences 1 and 5; 4 plays on each side of the first, 6 on each of the second:
    (1 * 4 * 4 / 8 + 5 * 6 * 6 / 12) / (4 * 4 / 8 + 6 * 6 / 12) = 17 / 5."""
    outcomes = replace(
        arms([0.0, 0, 0, 0], [1.0, 1, 5, 5]),
        stage=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        plays=np.array([2.0, 2, 3, 3, 2, 2, 3, 3]),
    )
    assert compare(outcomes).difference == pytest.approx(17 / 5)


def test_an_agent_in_two_stages_is_one_agent() -> None:
    """The same agents with the same luck once more: nothing is known that was not known before."""
    once = arms([0.0, 4, 8, 2], [1.0, 5, 9, 4])
    names = ("unit", "challenger", "mean", "plays", "spread", "before")
    columns = {name: np.tile(getattr(once, name), 2) for name in names}
    twice = AgentOutcomes(stage=np.repeat([0, 1], 8), **columns)
    others = replace(twice, unit=np.arange(16))
    assert compare(twice).information == pytest.approx(compare(once).information, rel=0.05)
    assert compare(others).information == pytest.approx(2 * compare(once).information, rel=0.05)


def test_more_play_of_the_same_agents_is_more_information() -> None:
    random = np.random.default_rng(1)
    exposures = [Exposure(unit=f"{i}", stage=0, challenger=i % 2 == 0) for i in range(60)]
    plays = [(f"{i}", 0, float(random.normal())) for _ in range(50) for i in range(60)]
    information = [
        compare(outcomes_of_plays(exposures, plays[: 60 * rounds], {})).information
        for rounds in (2, 10, 50)
    ]
    assert information == pytest.approx([120, 600, 3000], rel=0.35)


def test_plays_become_means_with_their_spread() -> None:
    exposures = [Exposure(unit=unit, stage=0, challenger=unit > "b") for unit in "abc"]
    plays = [("a", 0, 1.0), ("a", 0, 3.0), ("c", 0, 5.0), ("c", 1, 9.0), ("stranger", 0, 9.0)]
    outcomes = outcomes_of_plays(exposures, plays, {"c": 7.0})
    assert outcomes.mean.tolist() == [2.0, 5.0]
    assert (outcomes.plays.tolist(), outcomes.spread.tolist()) == ([2.0, 1.0], [2.0, 0.0])
    assert outcomes.challenger.tolist() == [False, True]
    assert np.isnan(outcomes.before[0]) and outcomes.before[1] == 7.0


def test_a_small_arm_in_which_the_rare_win_has_not_happened_yet_is_not_surely_worse() -> None:
    """One agent in twenty wins 20, all others lose 1: that none of nineteen challengers has won
    yet is no evidence, though their own variance is zero."""
    found = compare(arms([20.0] * 19 + [-1.0] * 361, [-1.0] * 19 + [-1.0]))
    assert found.low < 0 < found.high


def test_among_few_agents_all_may_have_failed_by_luck() -> None:
    few, many = (compare(arms([0.0] * 95, [1.0] * n), shares=True) for n in (3, 5))
    assert few.difference == many.difference == few.high == 1.0
    assert -1 <= few.low < 0 < 0.05 < many.low


@pytest.mark.parametrize("challenger", [[], [1.0]])
def test_two_agents_on_each_side_are_the_least(challenger: list[float]) -> None:
    assert difference(arms([1.0, 2.0, 3.0], challenger)) is None


def test_agents_that_all_came_to_the_same_do_not_differ_by_a_rounding_error() -> None:
    found = compare(arms([-1 / 3] * 7, [-1 / 3] * 5))
    assert (found.difference, found.low, found.high) == (0, 0, 0)


def test_two_agents_of_one_outcome_prove_less_than_twenty() -> None:
    few, many = (compare(arms([0.0] * (40 - n), [5.0] * n)) for n in (2, 20))
    assert few.difference == many.difference == 5
    assert few.low < 0 < many.low and few.explained == many.explained == 0


@pytest.mark.parametrize("outcomes", [(0.1, 0.3), (0.25, 0.5)])
def test_arms_without_variance_have_an_interval_of_their_size(
    outcomes: tuple[float, float],
) -> None:
    """A mean of seven times 0.1 is not 0.1, and that error is no variance."""
    exposures = [Exposure(unit=f"{i}", stage=0, challenger=i % 2 == 0) for i in range(40)]
    plays = [(f"{i}", 0, outcomes[i % 2 == 0]) for i in range(40) for _ in range(7)]
    found = compare(outcomes_of_plays(exposures, plays, {}))
    assert 0 < found.low < found.difference < found.high < 1
