from collections import Counter

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.core.artifacts import read_artifact, write_artifact
from babylon.core.settings import Settings
from babylon.core.types import Claim, Validated
from babylon.stages.dropout import (
    MIN_GROUP,
    DropoutCandidate,
    choose_dropped,
    drop_count,
    thin_window,
)


def candidates(*sizes, scenarios=1):
    """Agent number i has ``sizes[i]`` trajectories, dealt over the scenarios."""
    return [
        DropoutCandidate(
            trajectory_id=f"t{agent}-{number}",
            agent_id=f"a{agent}",
            scenario_id=f"s{(agent + number) % scenarios}",
        )
        for agent, size in enumerate(sizes)
        for number in range(size)
    ]


def drop(everyone, target, max_dropout=0.3, min_agents=3, key="2025-11-14T09:00/0"):
    return choose_dropped(
        everyone, target=target, max_dropout=max_dropout, min_agents=min_agents, key=key
    )


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(2, 80),
    st.floats(0, 0.95),
    st.integers(2, 6),
    st.randoms(),
)
@settings(max_examples=150)
def test_dropout_keeps_its_promises(sizes, scenarios, target, max_dropout, min_agents, random):
    everyone = candidates(*sizes, scenarios=scenarios)
    dropped = drop(everyone, target, max_dropout, min_agents)
    left = [c for c in everyone if c.trajectory_id not in dropped]

    assert len(dropped) <= max_dropout * len(everyone) + 1e-6
    assert len(left) >= min(target, len(everyone))
    before, after = Counter(c.scenario_id for c in everyone), Counter(c.scenario_id for c in left)
    assert all(after[group] >= min(2, size) for group, size in before.items())
    agents = {c.agent_id for c in left}
    assert len(agents) >= min(min_agents, len(sizes))

    random.shuffle(everyone)
    assert drop(everyone, target, max_dropout, min_agents) == dropped


def test_nothing_is_dropped_up_to_the_target_and_exactly_the_surplus_above_it():
    everyone = candidates(*[5] * 20)
    assert drop(everyone, target=100) == frozenset()
    assert len(drop(everyone, target=90)) == 10
    assert len(drop(everyone, target=10)) == 30


def test_each_agent_loses_about_the_same_share():
    dropped = drop(candidates(200, 100, 100, 20), target=10, max_dropout=0.25)
    lost = Counter(trajectory_id.split("-")[0] for trajectory_id in dropped)
    assert len(dropped) == 105
    assert abs(lost["t0"] - 50) <= 1
    assert abs(lost["t1"] - 25) <= 1
    assert abs(lost["t3"] - 5) <= 1


def test_another_seed_or_window_drops_others():
    everyone = candidates(*[3] * 30)
    choices = {drop(everyone, 60, key=key) for key in ("w1/0", "w1/1", "w2/0")}
    assert len(choices) == 3


def test_the_stage_writes_what_is_left_and_counts_the_rest(tmp_path):
    options = Settings(home=tmp_path, quality={"target_trajectories": 16, "max_dropout": 0.3})
    frame = pl.DataFrame([{**asdict(c), "calls_json": "[]"} for c in candidates(*[4] * 5)])
    claim = Claim(window_id="2025-11-14T09:00", epoch=1, owner="me")
    artifact = write_artifact(options.home, frame, window_id=claim.window_id)
    validated = Validated(claim=claim, artifact=artifact, agents=5, rejected={})

    thinned = thin_window(options, validated)
    assert (thinned.dropped, thinned.artifact.rows, thinned.agents) == (4, 16, 5)
    assert read_artifact(options.home, thinned.artifact).columns == frame.columns
    assert thin_window(options, validated) == thinned

    roomy = options.replace(quality={"target_trajectories": 20})
    assert thin_window(roomy, validated).artifact == artifact


def test_the_count_is_the_originals_formula_whatever_floats_make_of_it():
    """``count * min(max_dropout, 1 - target / count)``, rounded down, in exact arithmetic."""
    for count in range(1, 400):
        for target in (2, 50, 99, 100, 398):
            for percent in (0, 1, 7, 29, 30, 58, 95):
                exact = max(0, min(count - target, percent * count // 100))
                assert drop_count(count, target=target, max_dropout=percent / 100) == exact
    assert int(0.29 * 100) == 28  # which is why


def test_small_scenarios_keep_their_pair_however_much_must_go():
    everyone = candidates(*[10] * 6, scenarios=20)
    dropped = drop(everyone, target=2, max_dropout=0.95)
    before = Counter(c.scenario_id for c in everyone)
    left = Counter(c.scenario_id for c in everyone if c.trajectory_id not in dropped)
    assert left == {group: min(size, MIN_GROUP) for group, size in before.items()}


def asdict(candidate):
    return {name: getattr(candidate, name) for name in DropoutCandidate.__slots__}
