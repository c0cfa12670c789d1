"""Experiments between equal policies rarely end with a winner, also with a look every hour.

Each world is a fleet that is looked at after every window until it is decided. The outcomes are
drawn all at once; what is tested is the real comparison and the real decision.

The worlds are seeded, so an unchanged comparison never fails by chance. Of changed ones, one that
errs in 1 % of worlds fails with probability 0.3 % at 60 worlds, and one that errs in 20 %, as a z
test at every look does, passes with probability 0.1 %. ``WORLDS=1000`` makes the estimate finer.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from babylon.core.settings import ExperimentSettings
from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Cells, Floats
from babylon.evaluation.experiment.decision import Evidence, decide
from babylon.evaluation.experiment.difference import difference
from babylon.evaluation.experiment.guardrails import sample_ratio

LOOKS = 20
WORLDS = int(os.environ.get("WORLDS", "60"))
EVEN = (0.5,) * LOOKS
RAMP = (0.05,) * 2 + (0.25,) * 3 + (0.5,) * (LOOKS - 5)
SETTINGS = ExperimentSettings(max_hours=1000, min_hours=2)
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return random.standard_normal(shape)


def heavy(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Student's t with 2.5 degrees of freedom: of infinite kurtosis, standard deviation 1."""
    return random.standard_t(2.5, shape) / np.sqrt(5.0)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Log-normal, standard deviation 1, mean 0: many small losses, few great wins."""
    return (random.lognormal(0, 1, shape) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


@dataclass(frozen=True)
class Fleet:
    """A play a window of each agent: ``skill`` of the agent (standard deviation) plus luck (1) plus
    what the window brings to everybody. ``arriving``: equally many join in each window."""

    agents: int
    draw: Draw = normal
    shares: tuple[float, ...] = EVEN
    skill: float = 1.0
    arriving: bool = False
    gain: float = 0.0
    ruin: float = 0.0
    """Probability that a play of the challenger loses 100. The others earn as much together."""
    at_stake: float = 0.0
    shared: float = 0.0
    """Standard deviation of luck that all agents of an arm share in a window."""
    lasts: float = 0.0
    """Correlation of that luck in two windows in sequence."""
    by_hour: bool = True

    def looks(self, seed: int) -> Iterator[AgentOutcomes]:
        random = np.random.default_rng([seed, self.agents])
        skill = self.skill * self.draw(random, (self.agents,))
        played = skill[:, None] + self.draw(random, (self.agents, LOOKS))
        played += random.standard_normal(LOOKS)
        before = skill + self.draw(random, (self.agents, 4)).mean(axis=1)
        begun = np.arange(self.agents) * LOOKS // self.agents if self.arriving else 0
        active = np.arange(LOOKS) >= np.broadcast_to(begun, self.agents)[:, None]
        challenger = random.random(self.agents)[:, None] < np.array(self.shares)
        gain = self.gain + 100 * (self.ruin - (random.random(played.shape) < self.ruin))
        shocks = self.draw(random, (LOOKS, 2))
        for before_it, shock in pairwise(shocks):
            shock *= np.sqrt(1 - self.lasts**2)
            shock += self.lasts * before_it
        played += self.shared * np.where(challenger, shocks[:, 1], shocks[:, 0])
        values = np.where(active, played + gain * challenger, 0.0)
        starts = [0, *(np.flatnonzero(np.diff(self.shares)) + 1)]
        for look in range(1, LOOKS + 1):
            bounds = [*(start for start in starts if start < look), look]
            plays = np.add.reduceat(active[:, :look], bounds[:-1], axis=1, dtype=float)
            total = np.add.reduceat(values[:, :look], bounds[:-1], axis=1)
            squares = np.add.reduceat(values[:, :look] ** 2, bounds[:-1], axis=1)
            unit, stage = np.nonzero(plays)
            n = plays[unit, stage]
            mean = total[unit, stage] / n
            rows = np.full(plays.shape, -1)
            rows[unit, stage] = np.arange(len(unit))
            agent, window = np.nonzero(active[:, :look])
            cells = Cells(
                row=rows[agent, np.searchsorted(bounds, window, side="right") - 1],
                hour=window,
                plays=np.ones(len(agent)),
                total=values[agent, window],
            )
            yield AgentOutcomes(
                unit=unit,
                stage=stage,
                challenger=challenger[:, bounds[:-1]][unit, stage],
                mean=mean,
                plays=n,
                spread=np.maximum(squares[unit, stage] - n * mean**2, 0.0),
                before=before[unit],
                cells=cells if self.by_hour else None,
            )


def ends(
    fleet: Fleet, worlds: int, judge: Callable[[Fleet, AgentOutcomes, int], str]
) -> Counter[str]:
    """Ends of the worlds: with the first decision, or without any."""
    found: Counter[str] = Counter()
    for world in range(worlds):
        decisions = (
            judge(fleet, outcomes, hour) for hour, outcomes in enumerate(fleet.looks(world), 1)
        )
        found[next((one for one in decisions if one != "insufficient"), "insufficient")] += 1
    return found


def ours(fleet: Fleet, outcomes: AgentOutcomes, hour: int) -> str:
    first = np.unique(outcomes.unit, return_index=True)[1]
    ratio = sample_ratio(
        _shares(fleet, outcomes)[first].tolist(), int(outcomes.challenger[first].sum())
    )
    pnl = difference(outcomes, at_stake=fleet.at_stake)
    evidence = Evidence(pnl=pnl, ratios=(ratio, ratio), guardrails=(), hours=float(hour))
    return decide(evidence, SETTINGS)[0]


def z_test(fleet: Fleet, outcomes: AgentOutcomes, hour: int) -> str:
    """The test by hand: two means, their standard errors, 1.96."""
    arms = [outcomes.mean[outcomes.challenger == side] for side in (False, True)]
    if len(outcomes.unit) < SETTINGS.min_agents:
        return "insufficient"
    z = (arms[1].mean() - arms[0].mean()) / np.sqrt(sum(arm.var(ddof=1) / len(arm) for arm in arms))
    return "promote" if z > 1.96 else "rollback" if z < -1.96 else "insufficient"


def _shares(fleet: Fleet, outcomes: AgentOutcomes) -> Floats:
    return np.array(list(dict.fromkeys(fleet.shares)))[outcomes.stage]


NULLS = [
    Fleet(agents=400, arriving=True),
    Fleet(agents=60, draw=heavy),
    Fleet(agents=60, draw=skewed, skill=0.0),
    Fleet(agents=200, draw=skewed, shares=RAMP),
]


@pytest.mark.parametrize("fleet", NULLS)
def test_equal_policies_differ_in_at_most_a_twentieth_of_looks(fleet: Fleet) -> None:
    found = ends(fleet, WORLDS, ours)
    assert found["promote"] + found["rollback"] <= 0.05 * WORLDS
    assert found["promote"] <= 0.025 * WORLDS


@pytest.mark.parametrize("shares", [EVEN, RAMP])
@pytest.mark.parametrize("ruin", [0.003, 0.03])
def test_a_loss_too_rare_to_be_seen_is_allowed_for(ruin: float, shares: tuple[float, ...]) -> None:
    fleet = Fleet(agents=100, ruin=ruin, shares=shares, skill=0.0, at_stake=100.0)
    assert ends(fleet, WORLDS, ours)["promote"] <= 0.025 * WORLDS


def test_an_interval_of_what_was_seen_alone_is_deceived_by_a_rare_loss() -> None:
    found = ends(Fleet(agents=100, ruin=0.003, skill=0.0), WORLDS, ours)
    assert found["promote"] > 0.15 * WORLDS


ALIKE = [
    Fleet(agents=60, shared=1.0, skill=0.0),
    Fleet(agents=200, shared=0.5, skill=0.0, shares=RAMP),
    Fleet(agents=200, shared=1.0, skill=0.0, draw=skewed, at_stake=20.0),
    Fleet(agents=200, shared=1.0, arriving=True, at_stake=20.0),
]


@pytest.mark.parametrize("fleet", ALIKE)
def test_arms_whose_agents_win_and_lose_together_rarely_differ(fleet: Fleet) -> None:
    found = ends(fleet, WORLDS, ours)
    assert found["promote"] + found["rollback"] <= 0.05 * WORLDS
    assert ends(replace(fleet, by_hour=False), WORLDS, ours)["insufficient"] < 0.7 * WORLDS


def test_shared_luck_that_lasts_is_counted_as_fewer_windows() -> None:
    found = ends(Fleet(agents=100, shared=1.0, lasts=0.5, skill=0.0), WORLDS, ours)
    assert found["promote"] + found["rollback"] <= 0.2 * WORLDS


def test_a_gain_beside_shared_luck_is_promoted_when_it_is_large() -> None:
    found = ends(Fleet(agents=200, shared=0.5, gain=2.0, at_stake=5.0), WORLDS // 2, ours)
    assert found["promote"] >= 0.8 * (WORLDS // 2)


def test_an_ordinary_test_at_every_look_fails_the_same() -> None:
    found = ends(Fleet(agents=60, skill=0.0), WORLDS, z_test)
    assert found["promote"] + found["rollback"] > 0.15 * WORLDS


@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_a_gain_of_half_a_standard_deviation_is_promoted(skill: float) -> None:
    """400 agents that join one by one, so that the last look is the first at all of them."""
    gain = 0.5 * np.sqrt(skill**2 + 1)
    found = ends(Fleet(agents=400, arriving=True, skill=skill, gain=gain), WORLDS // 2, ours)
    assert found["promote"] >= 0.9 * (WORLDS // 2)
    assert found["rollback"] == 0


def test_a_canary_that_is_worse_is_rolled_back() -> None:
    found = ends(Fleet(agents=200, draw=heavy, shares=RAMP, gain=-1.0), WORLDS // 2, ours)
    assert found["rollback"] >= 0.9 * (WORLDS // 2)
    assert found["promote"] == 0
