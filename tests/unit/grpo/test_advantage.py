import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.grpo.advantage import advantages, weigh_calls
from babylon.grpo.batch import CallTokens, ScoredTrajectory


def trajectory(name: str, group: str, score: float, *lengths: int) -> ScoredTrajectory:
    calls = [
        CallTokens(prompt=[1], completion=[2] * length, logprobs=None) for length in lengths or (1,)
    ]
    return ScoredTrajectory(trajectory_id=name, group=group, score=score, calls=calls)


def test_the_baseline_is_the_mean_of_the_others() -> None:
    """Scores 1, 2, 6: 1 - (2 + 6) / 2 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5."""
    trio = [trajectory("a", "g", 1), trajectory("b", "g", 2), trajectory("c", "g", 6)]
    assert advantages(trio) == pytest.approx({"a": -3.0, "b": -1.5, "c": 4.5})


def test_groups_are_compared_within_themselves_alone() -> None:
    mixed = [
        trajectory("a", "easy", 10),
        trajectory("b", "easy", 12),
        trajectory("c", "hard", 0),
        trajectory("d", "hard", 2),
    ]
    result = advantages(mixed)
    assert result["a"] == result["c"] == -2.0 and result["b"] == result["d"] == 2.0


def test_a_group_of_one_and_a_tied_group_teach_nothing() -> None:
    alone = [trajectory("a", "alone", 1), trajectory("b", "tie", 2), trajectory("c", "tie", 2)]
    assert advantages(alone) == {}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_advantages_sum_to_zero(scores: list[float]) -> None:
    group = [trajectory(str(index), "g", score) for index, score in enumerate(scores)]
    assert sum(advantages(group).values()) == pytest.approx(0, abs=1e-9)


def test_every_call_gets_its_trajectorys_advantage_and_trajectories_weigh_the_same() -> None:
    pair = [trajectory("few", "g", 0, 4), trajectory("many", "g", 1, 2, 4, 6)]
    calls = weigh_calls(pair, advantages(pair))
    assert [call.advantage for call in calls] == [-1.0, 1.0, 1.0, 1.0]
    mass = [sum(c.weight for c in calls if c.trajectory == index) for index in (0, 1)]
    assert mass[0] == pytest.approx(mass[1]) == pytest.approx(1 / 4)  # C: mean length 4
