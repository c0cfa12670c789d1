import math
from dataclasses import replace

import numpy as np
import pytest

from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Exposure, outcomes_of_plays
from babylon.evaluation.experiment.difference import difference
from babylon.evaluation.experiment.guardrails import LOSSES, guard
from babylon.evaluation.experiment.shared_luck import SharedLuck, shared_luck


def played(
    by_hour: list[tuple[float, float]], *, own: float = 0.0, agents: int = 8
) -> AgentOutcomes:
    """Every agent plays in every hour for what the hour brings to its arm, ``by_hour``
    (champion, challenger), plus ``own`` luck with a sign that alternates by agent and hour."""
    exposures = [Exposure(unit=f"{a}", stage=0, challenger=a >= agents // 2) for a in range(agents)]
    plays, hours = [], []
    for hour, arms in enumerate(by_hour):
        for agent in range(agents):
            luck = own * (-1) ** (agent + hour)
            plays.append((f"{agent}", 0, arms[agent >= agents // 2] + luck))
            hours.append(hour)
    return outcomes_of_plays(exposures, plays, {}, hours)


def luck_of(outcomes: AgentOutcomes) -> SharedLuck:
    weight = np.where(outcomes.challenger, 0.25, -0.25)
    means = np.where(
        outcomes.challenger,
        outcomes.mean[outcomes.challenger].mean(),
        outcomes.mean[~outcomes.challenger].mean(),
    )
    found = shared_luck(outcomes, outcomes.mean - means, weight)
    assert found is not None
    return found


def test_luck_of_an_arm_by_hand() -> None:
    """The challenger's hours are at 1, -1, -1, 1 around its mean, the champion's all alike: the
    variance of an hour's difference is 4 / 3, that of their mean 1 / 3. The correlation of hours
    in sequence is (-1 + 1 - 1) / 3 over 1: none is counted."""
    found = luck_of(played([(0, 1), (0, -1), (0, -1), (0, 1)]))
    assert found.by_hour == pytest.approx(1 / 3)
    assert found.freedom == pytest.approx(3)
    assert found.hours == 4
    assert found.excess == pytest.approx(1 / 3 - 16 * (1 / 16) ** 2)  # minus that by cell


def test_what_an_hour_brings_to_both_arms_is_no_luck_of_one() -> None:
    found = luck_of(played([(5, 5), (-5, -5), (3, 3), (-3, -3)], own=1.0))
    assert found.by_hour == pytest.approx(0, abs=1e-12)
    assert found.excess == 0


def test_luck_that_lasts_makes_fewer_hours() -> None:
    changing, lasting = (
        [(0.0, float(sign)) for sign in signs] for signs in ([1, -1] * 8, [1] * 8 + [-1] * 8)
    )
    assert luck_of(played(lasting)).by_hour > 3 * luck_of(played(changing)).by_hour


def test_a_gap_in_time_is_no_sequence() -> None:
    signs = [1.0] * 8 + [-1.0] * 8
    outcomes = played([(0.0, sign) for sign in signs])
    assert outcomes.cells is not None
    outcomes.cells.hour[:] *= 2
    assert luck_of(outcomes).by_hour == pytest.approx(1 / 15)


def test_three_hours_say_too_little_of_shared_luck() -> None:
    assert difference(played([(0, 1)], own=1.0)) is None
    assert difference(played([(0, 1), (0, 2), (0, 3)], own=1.0)) is None
    assert difference(played([(0, 1), (0, 2), (0, 3), (0, 1)], own=1.0)) is not None


def test_plays_of_an_hour_count_as_one_when_they_are_alike() -> None:
    alike = luck_of(played([(0, 1), (0, -1), (0, -1), (0, 1)] * 5))
    assert alike.independent(160) == 20  # the hours
    alone = luck_of(played([(0, 0)] * 20, own=1.0))
    assert alone.independent(160) == pytest.approx(160)
    assert SharedLuck().independent(7) == 7


def test_heavy_losses_that_agents_share_break_no_guardrail_in_three_hours() -> None:
    few = guard(LOSSES, played([(0, 1), (0, 1), (0, 0)]))
    assert (few.state, few.change, few.low, few.high) == ("doubtful", pytest.approx(2 / 3), -1, 1)
    assert guard(LOSSES, played([(0, 0)] * 3)).state == "passes"
    assert guard(LOSSES, played([(0, 1), (0, 0)] * 4)).state == "doubtful"
    assert guard(LOSSES, played([(0, 1)] * 10, agents=20)).state == "broken"


def test_a_sum_of_variances_has_the_freedom_of_both() -> None:
    """Satterthwaite: (1 + 1)² / (1² / 10 + 1.2² / 4), and never below 4."""
    luck = SharedLuck(excess=1.0, by_hour=1.2, freedom=4.0)
    assert luck.added_to(1.0, 10.0) == pytest.approx((2.0, 4 / 0.46))
    assert replace(luck, by_hour=9.0).added_to(1.0, 10.0) == (2.0, 4.0)
    assert SharedLuck().added_to(1.0, 10.0) == pytest.approx((1.0, 10.0))
    assert SharedLuck().added_to(0.0, math.inf) == (0.0, math.inf)
