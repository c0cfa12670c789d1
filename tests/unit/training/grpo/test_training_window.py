"""The trainable part of a window, and its train steps."""

from collections import Counter
from dataclasses import replace

import pytest

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.losses import LOSSES
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, compile_window
from tests.unit.training.grpo.windows import window


def trajectory(name: str, group: str, score: float, *versions: int | None) -> ScoredTrajectory:
    calls = [
        CallTokens(prompt=[1, 2], completion=[3], logprobs=[-1.0], policy_version=version)
        for version in versions or (None,)
    ]
    return ScoredTrajectory(trajectory_id=name, group=group, score=score, calls=calls)


def grouped(*sizes: int) -> list[ScoredTrajectory]:
    return [
        trajectory(f"{group}-{agent}", f"g{group}", float(agent))
        for group, size in enumerate(sizes)
        for agent in range(size)
    ]


def steps(
    trajectories: list[ScoredTrajectory], per_step: int, iteration: int = 1
) -> list[Counter[str]]:
    """Of each train step: how many trajectories of each group are in it."""
    made = compile_window(trajectories, TrainerConfig(trajectories_per_step=per_step))
    result = []
    for step in made.steps(iteration):
        owners = {made.trajectory_of[position] for position in step.calls}
        result.append(Counter(made.groups[owner] for owner in owners))
    return result


def test_a_train_step_is_made_of_whole_groups() -> None:
    for step in steps(grouped(8, 8, 8, 8), per_step=16):
        assert sorted(step.values()) == [8, 8]


def test_a_group_larger_than_a_step_is_split_evenly() -> None:
    assert [step.total() for step in steps(grouped(32), per_step=10)] == [8, 8, 8, 8]


def test_steps_are_of_equal_size_and_cover_every_trajectory_once() -> None:
    made = steps(grouped(3, 5, 2, 7, 6), per_step=6)
    assert sorted(step.total() for step in made) == [5, 6, 6, 6]
    assert sum(made, Counter()) == {"g0": 3, "g1": 5, "g2": 2, "g3": 7, "g4": 6}
    assert all(len(step) <= 4 for step in made)


def test_the_order_follows_from_seed_and_iteration() -> None:
    window = grouped(4, 4, 4, 4, 4, 4)
    assert steps(window, 4, iteration=1) == steps(window, 4, iteration=1)
    assert steps(window, 4, iteration=1) != steps(window, 4, iteration=2)


def test_calls_of_an_older_policy_than_allowed_are_left_out_and_counted() -> None:
    mixed = [trajectory("a", "g", 0.0, 7, 5), trajectory("b", "g", 1.0, 6, 7, None)]
    made = compile_window(mixed, TrainerConfig(), staleness={7: 0, 6: 1, 5: 2})
    assert [call.policy_version for call in made.calls] == [7, 6, 7, None]
    assert list(made.staleness) == [0, 1, 0, None]
    assert made.calls_too_stale == 1


def test_a_version_that_is_no_ancestor_has_no_known_age() -> None:
    foreign = [trajectory("a", "g", 0.0, 99), trajectory("b", "g", 1.0, 99)]
    assert list(compile_window(foreign, TrainerConfig(), staleness={7: 0}).staleness) == [None] * 2


def test_two_versions_are_the_most_whatever_is_configured() -> None:
    old = [trajectory("a", "g", 0.0, 5, 4), trajectory("b", "g", 1.0, 5)]
    made = compile_window(old, TrainerConfig(max_staleness=9), staleness={5: 2, 4: 3})
    assert [call.policy_version for call in made.calls] == [5, 5]


@pytest.mark.parametrize(
    ("youngest", "remedy"),
    [(2, "after they were played, or set MAX_STALENESS=2"), (3, "after they were played")],
)
def test_a_window_of_old_policies_only_names_a_remedy(youngest: int, remedy: str) -> None:
    old = [trajectory("a", "g", 0.0, 3, 4), trajectory("b", "g", 1.0, 3)]
    with pytest.raises(NothingToTrainError) as failure:
        compile_window(old, TrainerConfig(), staleness={3: 4, 4: youngest})
    message = str(failure.value)
    assert "older than MAX_STALENESS=1 allows" in message
    assert f"version 3 (4 updates old, 2 calls), version 4 ({youngest} updates old" in message
    assert message.endswith(remedy)


def test_a_trajectory_of_stale_calls_alone_is_no_baseline_for_others() -> None:
    trio = [
        trajectory("a", "g", 0.0, 7),
        trajectory("b", "g", 1.0, 7),
        trajectory("c", "g", 9.0, 1),
    ]
    made = compile_window(trio, TrainerConfig(), staleness={7: 0, 1: 5})
    assert made.advantages == [-1.0, 1.0]
    assert made.trajectory_ids == ["a", "b"]


def test_every_call_of_a_trajectory_receives_its_advantage() -> None:
    made = compile_window(
        [trajectory("a", "g", 0.0, 1, 1, 1), trajectory("b", "g", 3.0, 1, 1)], TrainerConfig()
    )
    assert made.trajectory_of == [0, 0, 0, 1, 1]
    assert made.advantages == [-3.0, -3.0, -3.0, 3.0, 3.0]


def test_groups_without_differing_scores_are_dropped_and_counted() -> None:
    tied = [trajectory("t1", "tie", 1.0), trajectory("t2", "tie", 1.0)]
    made = compile_window([*grouped(2), *tied, trajectory("x", "alone", 5.0)], TrainerConfig())
    assert made.trajectory_ids == ["0-0", "0-1"] and made.groups_without_signal == 2


@pytest.mark.parametrize("kind", ["trajectory", "trajectory_tokens"])
def test_trajectories_have_equal_mass_however_much_they_said(kind: str) -> None:
    config = TrainerConfig(call_weight=kind)  # type: ignore[arg-type]
    made = compile_window(window(), config)
    assert made.mass_of_trajectories() == pytest.approx([1.0] * 8)
    shares = Counter[int]()
    [step] = made.steps(1)
    for position, weight in zip(step.calls, step.weights, strict=True):
        length = made.mean_length if kind == "trajectory" else made.lengths[position]
        shares[made.trajectory_of[position]] += weight * length  # type: ignore[assignment]
    assert list(shares.values()) == pytest.approx([1 / 8] * 8)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.call_weight])
def test_a_loss_with_its_own_normaliser_refuses_another(name: str) -> None:
    assert TrainerConfig(loss=name).normaliser == LOSSES[name].call_weight
    with pytest.raises(ValueError, match="normaliser of its own"):
        TrainerConfig(loss=name, call_weight="trajectory_tokens")


@pytest.mark.parametrize(
    ("option", "value"),
    [("loss", "ppo"), ("iterations", 0), ("max_tokens", 0), ("warmup_steps", -1)],
)
def test_an_impossible_option_is_refused_with_its_value(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=str(value)):
        replace(TrainerConfig(), **{option: value})  # type: ignore[arg-type]
