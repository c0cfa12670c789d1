"""The update against a naive reference, and what must not change it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from babylon.training.grpo import trainer
from babylon.training.grpo.advantage import advantages
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.learning_rate import (
    MOST_FACTOR,
    adapt_rate,
    begin_rate,
    rate_factor,
    set_rate_factor,
)
from babylon.training.grpo.losses import LOSSES
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, compile_window
from babylon.training.grpo.undo import MOST_UNDONE
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.trees import naive_logprobs, with_adapter
from tests.unit.training.grpo.windows import (
    naive_gradient,
    relative_error,
    trained_gradient,
    update,
    weights,
    window,
)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_formula(seed: int, known: bool) -> None:
    trajectories = window(seed, known=known)
    reference = naive_gradient(tiny_model(0), trajectories)
    assert relative_error(trained_gradient(tiny_model(0), trajectories), reference) < 1e-5


def test_the_gradient_of_an_adapter_is_that_of_the_formula() -> None:
    trajectories = window(known=False)
    adapted = with_adapter(tiny_model(0), 0.05)
    reference = naive_gradient(adapted, trajectories)
    assert relative_error(trained_gradient(adapted, trajectories), reference) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
def test_neither_portions_nor_order_change_the_gradient(loss: str) -> None:
    trajectories = window()
    whole = trained_gradient(tiny_model(0), trajectories, loss=loss)
    split = trained_gradient(tiny_model(0), trajectories, loss=loss, max_tokens=20)
    backwards = [replace(t, calls=t.calls[::-1]) for t in trajectories[::-1]]
    shuffled = trained_gradient(tiny_model(0), backwards, loss=loss)
    assert relative_error(split, whole) < 1e-5
    assert relative_error(shuffled, whole) < 1e-5


def test_neither_portions_nor_order_of_calls_change_a_whole_update() -> None:
    """Several iterations of several train steps, with a long call that pads the others."""
    options = {"iterations": 3, "trajectories_per_step": 4, "stop_kl": 9.0}
    trajectories = window()
    longest = max(trajectories[0].calls, key=lambda call: len(call.prompt))
    stretched = replace(longest, prompt=[*longest.prompt, *range(2, 40)], logprobs=None)
    trajectories[0] = replace(trajectories[0], calls=[*trajectories[0].calls, stretched])
    turned = [replace(t, calls=t.calls[::-1]) for t in trajectories]
    results = []
    for given, max_tokens in ((trajectories, 8192), (trajectories, 30), (turned, 8192)):
        model = tiny_model(0)
        report = update(model, given, max_tokens=max_tokens, **options)
        results.append((weights(model), report))
    (whole, expected), *others = results
    start = weights(tiny_model(0))
    for moved, report in others:
        assert relative_error(moved - start, whole - start) < 1e-3  # Adam divides by tiny moments
        assert report.training_loss == pytest.approx(expected.training_loss, abs=1e-5)
        assert report.kl_after == pytest.approx(expected.kl_after, rel=1e-3)


def test_a_single_full_window_step_needs_no_pass_of_its_own_for_p() -> None:
    """The first iteration's forward pass is p's: the same update as with p computed before."""
    forwards = []
    for per_step in (100, 4):
        model, trajectories = tiny_model(0), window()
        count = 0

        def counted(_: Any, __: Any, given: dict[str, Any]) -> None:
            nonlocal count
            count += given["input_ids"].numel() > 16  # not the probe of the model's attention

        model.model.register_forward_pre_hook(counted, with_kwargs=True)
        report = update(
            model, trajectories, iterations=2, trajectories_per_step=per_step, stop_kl=9.0
        )
        assert report.kl_before > 0 and report.kl_after > 0 and report.ratio_max > 1
        forwards.append(count)
    assert forwards == [3, 6]  # one a step, one for the report; and p's own in the second case


def test_an_update_makes_good_trajectories_likelier() -> None:
    trajectories, model = window(), tiny_model(0)
    advantage = advantages(trajectories)

    def preference() -> float:
        with torch.no_grad():
            return sum(
                advantage[t.trajectory_id] * float(naive_logprobs(model, call).mean())
                for t in trajectories
                for call in t.calls
            )

    before = preference()
    report = update(model, trajectories, iterations=3, stop_kl=1.0, stop_clip_fraction=1.0)
    assert preference() > before
    assert report.kl_after > 0 and report.iterations == 3 and report.calls_without_logprobs == 0


def test_the_remaining_iterations_are_dropped_once_the_policy_moved_far() -> None:
    report = update(tiny_model(0), window(), iterations=50, stop_kl=1e-4)
    assert report.stopped_early and report.iterations < 50
    clipped = update(
        tiny_model(0),
        window(),
        iterations=50,
        stop_kl=9.0,
        stop_clip_fraction=1e-3,
        learning_rate=1e-3,
    )
    assert clipped.stopped_early and clipped.iterations < 50
    assert clipped.clip_fraction <= 2e-3  # of what is left: more would have been undone


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce_is"])
@pytest.mark.parametrize("rate", [3e-3, 10.0])
def test_an_iteration_that_moves_the_policy_too_far_is_undone(loss: str, rate: float) -> None:
    """However large the rate, the policy learns, and stays within twice the bound."""
    model, trajectories = tiny_model(0), window()
    report = update(model, trajectories, iterations=6, loss=loss, learning_rate=rate)
    assert report.iterations_undone > 0 and report.train_steps > 0
    assert 0 < report.kl_after <= 2 * TrainerConfig().stop_kl
    assert report.learning_rate < rate


def test_a_rate_that_rises_within_an_attempt_still_falls_from_one_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of what it had doubled would be the same attempt again, and so on for ever."""
    monkeypatch.setattr(
        trainer, "adapt_rate", lambda adam, *_: set_rate_factor(adam, 2 * rate_factor(adam))
    )
    options = {"trajectories_per_step": 8, "learning_rate": 0.02, "target_kl": 0.02}
    report = update(tiny_model(0), window(), iterations=2, stop_kl=0.01, **options)
    assert 1 < report.iterations_undone < MOST_UNDONE and report.kl_after <= report.kl_limit


def test_undoing_returns_exactly_to_the_iteration_before() -> None:
    """The second iteration is a jump, because the first one takes half a step of warm-up."""
    options = {"warmup_steps": 1, "learning_rate": 2e-4, "stop_kl": 0.01, "undo_factor": 1.0}
    one, undone = tiny_model(0), tiny_model(0)
    kept = update(one, window(), iterations=1, **options)
    report = update(undone, window(), iterations=9, **options)
    assert kept.iterations_undone == 0 and kept.train_steps > 0
    assert (report.iterations, report.iterations_undone, report.stopped_early) == (1, 1, True)
    assert torch.equal(weights(undone), weights(one))
    for name in ("ratio_mean", "ratio_max", "clip_fraction", "masked_fraction", "entropy"):
        assert getattr(report, name) == getattr(kept, name)
    assert report.kl_after == kept.kl_after


def test_a_policy_that_any_step_moves_too_far_is_refused() -> None:
    with pytest.raises(FloatingPointError, match=r"too far.*lower LEARNING_RATE"):
        update(tiny_model(0), window(), iterations=2, stop_kl=1e-30, stop_clip_fraction=1.0)


def test_a_policy_that_the_last_step_broke_is_refused() -> None:
    model = tiny_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def broken_step(*_: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)

    optimizer.register_step_post_hook(broken_step)
    compiled = compile_window(window(), TrainerConfig(iterations=1))
    with pytest.raises(FloatingPointError, match="not finite: discard the model"):
        train_on_window(model, optimizer, compiled)


def test_gspo_is_not_stopped_by_a_clip_that_every_step_reaches() -> None:
    report = update(tiny_model(0), window(), loss="gspo", iterations=3, stop_kl=9.0)
    assert report.clip_fraction > TrainerConfig().stop_clip_fraction
    assert report.iterations == 3 and not report.stopped_early


def test_a_window_that_teaches_nothing_leaves_the_model_alone() -> None:
    model = tiny_model(0)
    before = weights(model)
    tied = [replace(t, score=0.5) for t in window()]
    with pytest.raises(NothingToTrainError, match="differing scores"):
        update(model, tied)
    assert torch.equal(weights(model), before)


def test_too_many_calls_without_logprobs_are_refused() -> None:
    with pytest.raises(NothingToTrainError, match="100% of the calls"):
        update(tiny_model(0), window(known=False), max_missing_logprobs=0.5)


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not() -> None:
    results = []
    for seed in (0, 0, 1):
        model = tiny_model(0)
        update(model, window(), iterations=2, trajectories_per_step=3, stop_kl=1.0, seed=seed)
        results.append(weights(model))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("advantage", "group_std"),
        ("advantage", "batch_std"),
        ("call_weight", "token"),
        ("call_weight", "trajectory_tokens"),
        ("entropy_floor", 9.0),
        ("grad_clip", 0.01),
        *(("loss", name) for name in LOSSES if name != "ppo_clip"),
    ],
)
def test_every_option_of_the_loss_changes_the_update(option: str, value: Any) -> None:
    """In the second iteration ratios have left one, some of them beyond the clip."""
    start = weights(tiny_model(0))
    moved = []
    for chosen in ({}, {option: value}):
        model = tiny_model(0)
        free = {"stop_kl": 99.0, "stop_clip_fraction": 1.0}
        update(model, window(), iterations=3, learning_rate=1e-3, **free, **chosen)
        moved.append(weights(model) - start)
    assert relative_error(moved[1], moved[0]) > 0.01


def test_warm_up_makes_the_first_steps_of_an_optimisers_life_shorter() -> None:
    moved = {}
    for warmup in (0, 9):
        model = tiny_model(0)
        report = update(model, window(), iterations=1, warmup_steps=warmup)
        moved[warmup] = float((weights(model) - weights(tiny_model(0))).norm())
        assert report.learning_rate == pytest.approx(1e-4 / (warmup + 1))
    assert moved[9] == pytest.approx(moved[0] / 10, rel=1e-2)


def test_an_optimiser_warms_up_once() -> None:
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    config = TrainerConfig(iterations=4, warmup_steps=3, learning_rate=1e-5, stop_kl=9.0)
    first = train_on_window(model, optimizer, compile_window(window(), config))
    assert first.train_steps == 4 and first.learning_rate == pytest.approx(1e-5)
    carried = torch.optim.AdamW(model.parameters(), lr=1.0)
    carried.load_state_dict(optimizer.state_dict())
    once = replace(config, iterations=1)
    assert train_on_window(model, carried, compile_window(window(1), once)).learning_rate == 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-6, 3e-3])
@pytest.mark.parametrize("per_step", [3, 100])
def test_the_learning_rate_adapts_to_a_target_divergence(rate: float, per_step: int) -> None:
    """From 1e-6, which moves nothing, and from 3e-3, which moves much too far."""
    model = with_adapter(tiny_model(0), 0.05)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0)
    target = 1e-3
    config = TrainerConfig(
        learning_rate=rate,
        trajectories_per_step=per_step,
        target_kl=target,
        warmup_steps=0,
        stop_kl=3 * target,
    )
    moved = [
        train_on_window(model, optimizer, compile_window(window(known=False), config)).kl_after
        for _ in range(4)
    ]
    assert all(target / 4 < kl < 6 * target for kl in moved[2:]), moved
    fixed = replace(config, target_kl=None, iterations=1)
    report = train_on_window(model, optimizer, compile_window(window(known=False), fixed))
    assert report.iterations_undone or report.learning_rate == rate


@pytest.mark.parametrize(("rate", "factors"), [(1e-6, [2.0, 4.0, 8.0]), (1e-3, [0.5, 0.25])])
def test_an_update_of_a_single_step_adapts_the_rate_of_the_next(
    rate: float, factors: list[float]
) -> None:
    """No later step sees how far it went, so what the report measures decides."""
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    config = TrainerConfig(
        iterations=1,
        trajectories_per_step=100,
        learning_rate=rate,
        target_kl=1e-4,
        warmup_steps=0,
        stop_kl=99.0,  # undoing would lower the rate too
    )
    assert compile_window(window(), config).steps_an_iteration == 1
    found = []
    for _ in factors:
        train_on_window(model, optimizer, compile_window(window(), config))
        found.append(rate_factor(optimizer))
    assert found == factors


def test_windows_that_move_nothing_do_not_raise_the_learning_rate_for_ever() -> None:
    optimizer = torch.optim.AdamW(tiny_model(0).parameters())
    config = TrainerConfig(target_kl=0.02)
    begin_rate(optimizer, config)
    for _ in range(2000):
        adapt_rate(optimizer, config, moved=0.0, share=0.5)
    assert rate_factor(optimizer) == MOST_FACTOR < 2**MOST_UNDONE


def test_a_log_of_another_policy_is_not_taken_for_a_policy_that_moved() -> None:
    """pi_theta / mu exceeds the cap in every token, before the first step."""
    older = [
        replace(t, calls=[replace(c, logprobs=[-50.0] * len(c.completion)) for c in t.calls])
        for t in window()
    ]
    report = update(tiny_model(0), older, iterations=2, loss="cispo")
    assert (report.iterations, report.iterations_undone) == (2, 0) and report.clip_fraction > 0.9
    with pytest.raises(NothingToTrainError, match="masked"):
        update(tiny_model(0), older, iterations=2, loss="reinforce_is")


def impossible(trajectories: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The same calls as if another model had sampled them: all of their tokens are masked."""
    return [
        replace(t, calls=[replace(c, logprobs=[9.0] * len(c.completion)) for c in t.calls])
        for t in trajectories
    ]


def test_a_window_whose_every_token_is_masked_leaves_the_model_alone() -> None:
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = TrainerConfig(iterations=1, stop_kl=10.0)
    train_on_window(model, optimizer, compile_window(window(), config))  # Adam has moments now
    before = weights(model)
    with pytest.raises(NothingToTrainError, match="is masked"):
        train_on_window(model, optimizer, compile_window(impossible(window()), config))
    assert torch.equal(weights(model), before)


def test_a_window_whose_every_token_is_masked_tells_nothing_of_the_rate() -> None:
    """An objective of pairs may go on with this optimiser."""
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    config = TrainerConfig(iterations=4, trajectories_per_step=8, target_kl=0.02)
    with pytest.raises(NothingToTrainError, match="is masked"):
        train_on_window(model, optimizer, compile_window(impossible(window()), config))
    assert rate_factor(optimizer) == 1.0
