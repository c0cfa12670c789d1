from dataclasses import replace
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.credit import call_advantages, returns
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, compile_window


def trajectory(name, rewards, *, group="g", score=None, steps=None):
    """A trajectory with one call a step; its score is the sum of its rewards by default."""
    earned = dict(enumerate(rewards))
    taken = range(len(rewards)) if steps is None else steps
    return ScoredTrajectory(
        trajectory_id=name,
        group=group,
        score=sum(rewards) if score is None else score,
        rewards=earned,
        calls=[
            CallTokens(prompt=[1, step + 2], completion=[2], logprobs=None, step=step)
            for step in taken
        ],
    )


def config(discount, **more):
    return TrainerConfig(credit="decision", discount=discount, **more)


def test_returns_by_hand():
    """Rewards 1, 2, 4 of a score of 10: 3 belong to no step."""
    own = trajectory("a", [1.0, 2.0, 4.0], score=10.0)
    assert returns(own, 0.0) == {0: 4, 1: 5, 2: 7}
    assert returns(own, 0.5) == {0: 3 + 1 + 1 + 1, 1: 3 + 2 + 2, 2: 7}
    assert returns(own, 1.0) == {0: 10, 1: 9, 2: 7}


def test_a_decision_is_compared_with_the_same_tick_of_the_others():
    group = [trajectory("a", [3, 0]), trajectory("b", [0, 6]), trajectory("c", [0, 0])]
    found = call_advantages(group, config(0.0))
    assert found == {
        "a": pytest.approx([3, -3]),
        "b": pytest.approx([-1.5, 6]),
        "c": pytest.approx([-1.5, -3]),
    }


def test_calls_of_one_step_share_its_advantage_and_a_step_alone_meets_all_steps_of_the_others():
    """Step 2 of a returns 5, the steps of b 0 and 0; step 1 of b returns 0, those of a 1 and 5."""
    own = trajectory("a", [1, 0, 5], steps=(0, 0, 2))
    other = trajectory("b", [0, 0], steps=(0, 1))
    assert call_advantages([own, other], config(0.0)) == {"a": [1, 1, 5], "b": [-1, -3]}
    scaled = call_advantages([own, other], config(0.0, advantage="group_std"))
    assert scaled["a"][2] == pytest.approx(5 / pstdev([0, 0, 5]))
    assert call_advantages([own], config(0.0)) == {}


rewards = st.lists(st.floats(-1, 1), min_size=4, max_size=4)


@given(st.lists(rewards, min_size=2, max_size=6), st.floats(0, 1))
def test_the_advantages_of_a_tick_sum_to_zero(earned, discount):
    group = [trajectory(str(number), own) for number, own in enumerate(earned)]
    found = call_advantages(group, config(discount))
    for values in zip(*found.values(), strict=True):
        assert sum(values) == pytest.approx(0, abs=1e-9)


@given(st.lists(rewards, min_size=2, max_size=6))
def test_the_first_decision_has_the_trajectorys_advantage_without_discount(earned):
    group = [trajectory(str(number), own) for number, own in enumerate(earned)]
    whole = call_advantages(group, TrainerConfig(credit="trajectory"))
    by_decision = call_advantages(group, config(1.0))
    for name in whole.keys() & by_decision.keys():
        assert by_decision[name][0] == pytest.approx(whole[name][0], abs=1e-6)


def test_equal_steps_teach_nothing():
    group = [trajectory(name, [0.5, 0.1]) for name in "abc"]
    assert call_advantages(group, config(0.0)) == {}
    with pytest.raises(NothingToTrainError, match="differing scores"):
        compile_window(group, config(0.0))


def test_scores_that_differ_too_little_are_told_the_bound():
    group = [trajectory(name, [], steps=(0,), score=s) for name, s in (("a", 0.0001), ("b", 0.0))]
    with pytest.raises(NothingToTrainError, match=r"below 0\.001 is a tie.*wider scores"):
        compile_window(group, config(0.0))


def test_scores_alone_are_compared_as_trajectories():
    judged = [
        replace(trajectory(name, [0, 0], score=s), rewards={}) for name, s in (("a", 0), ("b", 1))
    ]
    assert call_advantages(judged, config(0.0)) == {"a": [-1, -1], "b": [1, 1]}


def test_rewards_move_advantages_and_never_tokens():
    """Rewards come from ground truth."""
    first = compile_window([trajectory("a", [1, 0]), trajectory("b", [0, 0])], config(0.0))
    second = compile_window([trajectory("a", [0, 9]), trajectory("b", [5, 0])], config(0.0))
    assert first.advantages != second.advantages
    assert first.calls == second.calls and first.lengths == second.lengths


def test_scales_divide_by_the_spread_of_the_tick_or_the_window():
    pair = [trajectory("a", [4, 0]), trajectory("b", [0, 0])]
    assert call_advantages(pair, config(0.0, advantage="group_std")) == {"a": [1, 0], "b": [-1, 0]}
    assert call_advantages(pair, config(0.0, advantage="batch_std")) == {"a": [1, 0], "b": [-1, 0]}


def test_the_windows_spread_is_one_for_groups_of_either_credit():
    """Feedback may give steps rewards in one scenario and whole plays in another."""
    steps = [trajectory("a", [3]), trajectory("b", [1])]
    plays = [
        trajectory(name, [], score=score, group="h", steps=(0,))
        for name, score in (("c", 0.2), ("d", 0.0))
    ]
    found = call_advantages([*steps, *plays], config(0.0, advantage="batch_std"))
    spread = pstdev([2, -2, 0.2, -0.2])
    assert [found[name] for name in "abcd"] == [
        pytest.approx([value / spread]) for value in (2, -2, 0.2, -0.2)
    ]
