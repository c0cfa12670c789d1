import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.training.grpo.advantage import CallWeight, advantages, call_masses, call_weights
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory


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


def test_group_std_divides_by_the_groups_spread() -> None:
    """Scores 1, 2, 6 about 3: spread sqrt((4 + 1 + 9) / 3) = 2.1602."""
    trio = [trajectory("a", "g", 1), trajectory("b", "g", 2), trajectory("c", "g", 6)]
    assert advantages(trio, "group_std") == pytest.approx(
        {"a": -2 / 2.1602, "b": -1 / 2.1602, "c": 3 / 2.1602}, rel=1e-4
    )


def test_batch_std_divides_by_the_windows_spread_and_keeps_groups_apart() -> None:
    """Leave-one-out: ±2 in one group, ±1 in the other; spread sqrt((4 + 4 + 1 + 1) / 4)."""
    pairs = [
        trajectory("a", "one", 0),
        trajectory("b", "one", 2),
        trajectory("c", "two", 0),
        trajectory("d", "two", 1),
    ]
    spread = 2.5**0.5
    assert advantages(pairs, "batch_std") == pytest.approx(
        {"a": -2 / spread, "b": 2 / spread, "c": -1 / spread, "d": 1 / spread}
    )
    tied = [trajectory("a", "tie", 2), trajectory("b", "tie", 2)]
    assert advantages(tied, "batch_std") == {}


LENGTHS, TRAJECTORY_OF = (4, 2, 6), (0, 1, 1)


@pytest.mark.parametrize(
    ("kind", "masses", "weights"),
    [
        ("trajectory", [1 / 2, 1 / 4, 1 / 4], [1 / 10, 1 / 20, 1 / 20]),  # C = 5
        ("trajectory_tokens", [1 / 2, 1 / 8, 3 / 8], [1 / 8, 1 / 16, 1 / 16]),
        ("token", [4 / 12, 2 / 12, 6 / 12], [1 / 12] * 3),
        ("call", [1 / 3] * 3, [1 / 12, 1 / 6, 1 / 18]),
        ("constant", [1 / 3] * 3, [1 / 300] * 3),
    ],
)
def test_masses_and_weights_of_calls_by_hand(
    kind: CallWeight, masses: list[float], weights: list[float]
) -> None:
    assert call_masses(LENGTHS, TRAJECTORY_OF, kind) == pytest.approx(masses)
    made = call_weights(LENGTHS, TRAJECTORY_OF, kind, mean_length=5.0, constant=100)
    assert made == pytest.approx(weights)
