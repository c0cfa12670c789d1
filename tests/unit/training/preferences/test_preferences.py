"""DPO and KTO on the tree: gradients against one reply at a time, bounds, ranks and resumption."""

import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_changes

from babylon.core.preferences import ValuedReply
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.learning_rate import rate_factor
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError
from babylon.training.preferences.config import PairLoss, PreferenceConfig
from babylon.training.preferences.examples import labelled_examples, paired_examples
from babylon.training.preferences.trainer import train_on_preferences
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.windows import Probe, relative_error, weights, window
from tests.unit.training.preferences.pairs import (
    first_gradient,
    gradient_of,
    naive_pair_loss,
    naive_sums,
    prompts,
    settings,
    update,
)

LABELS = TrainerConfig(credit="trajectory")


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("nll", [0.0, 0.7])
@pytest.mark.parametrize("max_tokens", [5, 3072])
def test_a_step_has_the_gradient_of_the_formula(
    loss: PairLoss, nll: float, max_tokens: int
) -> None:
    """Also where the replies of a pair are in different portions of the tree."""
    model, examples = tiny_model(0), paired_examples(prompts(), 0.0, 512)
    options = PreferenceConfig(loss=loss, nll=nll)
    ours = first_gradient(model, examples, options, max_tokens=max_tokens)
    theta = naive_sums(model, examples)
    reference = theta.detach()
    expected = gradient_of(model, naive_pair_loss(theta, reference, examples, options))
    assert relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
def test_a_later_step_has_the_gradient_at_the_moved_policy(loss: PairLoss) -> None:
    model, examples = tiny_model(0), paired_examples(prompts(), 0.0, 512)
    options = PreferenceConfig(loss=loss)
    reference = naive_sums(model, examples).detach()

    class Moving(Probe):
        """Moves the weights after the first step, and remembers where they were."""

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.02 * torch.sin(torch.arange(p.numel())).view_as(p))
            self.before = getattr(self, "after", None)
            self.after = copy.deepcopy(model.state_dict())

    moving = Moving(model)
    train_on_preferences(model, moving, examples, settings(iterations=2), options)
    assert moving.before is not None
    model.load_state_dict(moving.before)
    theta = naive_sums(model, examples)
    assert not torch.allclose(theta, reference, atol=1e-2)
    expected = gradient_of(model, naive_pair_loss(theta, reference, examples, options))
    assert relative_error(moving.gradients[1], expected) < 1e-5


def labelled() -> Any:
    return labelled_examples(window(agents=3), LABELS)


@pytest.mark.parametrize("moved", [False, True])
def test_unpaired_replies_have_the_gradient_of_the_formula(moved: bool) -> None:
    model, examples, options = tiny_model(0), labelled(), PreferenceConfig(beta=0.5)
    reference = naive_sums(model, examples).detach()
    others = replace(examples, calls=examples.mismatched.calls)
    then = naive_sums(model, others).detach()
    places: list[dict[str, Any]] = []

    class Moving(Probe):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            places.append(copy.deepcopy(model.state_dict()))
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.02 * torch.cos(torch.arange(p.numel())).view_as(p))

    moving = Moving(model)
    train_on_preferences(model, moving, examples, settings(iterations=1 + moved), options)
    model.load_state_dict(places[-1])
    theta = naive_sums(model, examples)
    z = (naive_sums(model, others) - then).mean().clamp(min=0).detach()
    terms = []
    mass = {1: 0, -1: 0}
    for unit in examples.units:
        for label in unit.labels:
            mass[label] += 1
    for unit in examples.units:
        for c, y in zip(unit.calls, unit.labels, strict=True):
            weight = sum(mass.values()) / (2 * mass[y])
            terms.append(weight * (1 - torch.sigmoid(y * 0.5 * (theta[c] - reference[c] - z))))
    expected = gradient_of(model, sum(terms[1:], terms[0]) / len(terms))
    assert relative_error(moving.gradients[-1], expected) < 1e-5


def test_replies_that_nothing_values_are_not_said_to_be_too_few() -> None:
    """Rows of the live game: more replies and a lower margin would change nothing."""
    with pytest.raises(NothingToTrainError, match=r"live game.* set PREFERENCE_VALUES=judge"):
        paired_examples([], 0.0, 512)


def test_the_shared_prompt_of_replies_is_forwarded_once() -> None:
    sampled = prompts(replies=4)
    examples = paired_examples(sampled, 0.0, 512)
    prompt_tokens = {p.prompt_token_ids[:n] for p in sampled for n in range(1, 99)}
    replies = sum(len(set(p.replies)) * 6 for p in sampled)
    assert examples.tree.unique_tokens <= len(prompt_tokens) + replies


def test_better_replies_become_likelier_than_worse_ones() -> None:
    report = update(tiny_model(0), paired_examples(prompts(), 0.0, 512), iterations=5)
    assert report.accuracy_after > 0.9 and report.margin_after > 0
    assert report.pairs == 12 and report.trained_trajectories == 4
    good = update(tiny_model(0), labelled(), iterations=5)
    assert good.accuracy_after > 0.8 and good.pairs == 0


def test_portions_do_not_change_an_update() -> None:
    one, other = tiny_model(0), tiny_model(0)
    examples = paired_examples(prompts(), 0.0, 512)
    update(one, examples, iterations=3, trajectories_per_step=2)
    update(other, examples, iterations=3, trajectories_per_step=2, max_tokens=7)
    assert relative_error(weights(one), weights(other)) < 1e-6


@pytest.mark.parametrize(
    "change",
    [{"beta": 0.5}, {"nll": 1.0}, {"loss": "ipo"}, {"loss": "sigmoid_norm"}],
)
def test_each_option_changes_the_update(change: dict[str, Any]) -> None:
    examples = paired_examples(prompts(), 0.0, 512)
    base, changed = tiny_model(0), tiny_model(0)
    update(base, examples, iterations=2)
    update(changed, examples, PreferenceConfig(**change), iterations=2)
    assert not torch.allclose(weights(base), weights(changed), atol=1e-6)


def test_an_update_ends_once_the_policy_has_moved_far() -> None:
    examples = paired_examples(prompts(), 0.0, 512)
    report = update(tiny_model(0), examples, iterations=50, stop_kl=0.01, undo_factor=100.0)
    assert report.stopped_early and report.iterations < 50


def test_an_update_that_moved_much_too_far_starts_again_with_a_smaller_rate() -> None:
    examples = paired_examples(prompts(), 0.0, 512)
    report = update(tiny_model(0), examples, iterations=3, learning_rate=0.05, stop_kl=0.01)
    assert report.iterations_undone > 0 and report.kl_after <= 0.02
    assert report.learning_rate < 0.05


def test_a_rate_that_rises_within_an_attempt_still_falls_from_one_to_the_next() -> None:
    """The second attempt adapted to twice the rate that it began with, and repeated itself."""
    examples = labelled_examples(window(), TrainerConfig())
    config = TrainerConfig(
        iterations=2, trajectories_per_step=4, warmup_steps=2, learning_rate=1e-3, target_kl=0.02
    )
    model = tiny_model(0)
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    report = train_on_preferences(model, adam, examples, config, PreferenceConfig())
    assert 1 < report.iterations_undone < 10 and report.kl_after <= config.stop_kl


@pytest.mark.parametrize(("rate", "factor"), [(1e-7, 2.0), (1e-3, 0.5)])
def test_an_update_of_a_single_step_adapts_the_rate_of_the_next(rate: float, factor: float) -> None:
    config = TrainerConfig(
        iterations=1,
        trajectories_per_step=8,
        learning_rate=rate,
        target_kl=1e-4,
        warmup_steps=0,
        stop_kl=99.0,  # undoing would lower the rate too
    )
    model = tiny_model(0)
    adam = torch.optim.AdamW(model.parameters())
    examples = paired_examples(prompts(), 0.0, 512)
    train_on_preferences(model, adam, examples, config, PreferenceConfig())
    assert rate_factor(adam) == factor


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_an_update_that_ends_beyond_its_bound_is_drawn_back_to_it(kind: str) -> None:
    """Nothing stops the only step, which sees nothing of what it does itself."""
    examples = paired_examples(prompts(), 0.0, 512) if kind == "pairs" else labelled()
    free, bound, started = tiny_model(0), tiny_model(0), weights(tiny_model(0))
    given = {"iterations": 1, "learning_rate": 1e-3, "undo_factor": 1e9}
    far = update(free, examples, stop_kl=1e9, **given)
    near = update(bound, examples, stop_kl=far.kl_after / 4, **given)
    assert far.share_kept == 1.0 and near.iterations_undone == 0
    assert far.kl_after / 8 < near.kl_after <= far.kl_after / 4
    assert 0.3 < near.share_kept < 0.7
    way = weights(free) - started
    torch.testing.assert_close(weights(bound), started + near.share_kept * way)
    assert near.margin_after > 0


def test_a_rate_that_never_fits_is_an_error() -> None:
    examples = paired_examples(prompts(), 0.0, 512)
    with pytest.raises(FloatingPointError, match="LEARNING_RATE"):
        update(tiny_model(0), examples, learning_rate=1e6, stop_kl=1e-9)


class Kept:
    """A journal in memory that ends the update at a step."""

    def __init__(self, last: int) -> None:
        self.last, self.saved, self.model, self.optimizer = last, [], None, None
        self.held: Any = None

    def restore(self) -> None:
        return None

    def save(self, state: Any) -> None:
        self.saved.append(copy.deepcopy(state))
        if len(self.saved) == self.last:
            raise InterruptedError


@pytest.mark.parametrize(
    ("kind", "rate"), [("pairs", 1e-3), ("labels", 1e-3), ("pairs", 0.05)], ids=str
)
def test_a_resumed_update_ends_where_an_uninterrupted_one_does(kind: str, rate: float) -> None:
    """The last one undoes iterations, which lowers the rate."""
    examples = paired_examples(prompts(), 0.0, 512) if kind == "pairs" else labelled()
    config = settings(learning_rate=rate, iterations=3, trajectories_per_step=2, stop_kl=0.03)

    def adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1.0)

    whole = tiny_model(0)
    expected = train_on_preferences(whole, adam(whole), examples, config, PreferenceConfig())
    model = tiny_model(0)
    optimizer, journal = adam(model), Kept(last=3)
    with pytest.raises(InterruptedError):
        train_on_preferences(
            model, optimizer, examples, config, PreferenceConfig(), journal=journal
        )
    state, own = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = tiny_model(1)
    again.load_state_dict(state)
    resumed = adam(again)
    resumed.load_state_dict(own)
    report = train_on_preferences(
        again, resumed, examples, config, PreferenceConfig(), saved=journal.saved[-1]
    )
    assert torch.equal(weights(again), weights(whole))
    assert report.iterations_undone == expected.iterations_undone


def test_pairs_need_values_that_differ_by_more_than_the_margin() -> None:
    one = prompts(count=1)[0]
    replies = tuple(
        ValuedReply(completion_token_ids=(token,), value=value)
        for token, value in ((5, 0.7), (6, 1.0), (7, 1.5), (5, -0.7))  # the mean of 5 is 0
    )
    examples = paired_examples([with_changes(one, replies=replies)], 0.6, 512)
    (unit,) = examples.units
    told = [tuple(examples.calls[c].completion[0] for c in pair) for pair in unit.pairs]
    assert sorted(told) == [(6, 5), (7, 5)]
    with pytest.raises(NothingToTrainError, match="PREFERENCE_MARGIN"):
        paired_examples([with_changes(one, replies=replies)], 2.0, 512)


def test_replies_beyond_the_context_are_left_out() -> None:
    (one,) = prompts(count=1, replies=2)
    with pytest.raises(NothingToTrainError):
        paired_examples([one], 0.0, len(one.prompt_token_ids))


def test_a_trajectory_without_a_group_is_compared_with_the_window() -> None:
    call = CallTokens(prompt=[1], completion=[2], logprobs=None)
    lonely = [
        ScoredTrajectory(trajectory_id=str(n), group=str(n), score=float(n), calls=[call])
        for n in range(3)
    ]
    examples = labelled_examples(lonely, LABELS)
    told = {unit.trajectory_id: unit.labels for unit in examples.units}
    assert told == {"0": (-1,), "2": (1,)}  # the middle one is the mean
    assert examples.label_weights == {1: 1.0, -1: 1.0}
    with pytest.raises(NothingToTrainError, match="better or worse"):
        labelled_examples([replace(one, score=1.0) for one in lonely], LABELS)


@pytest.mark.parametrize("scores", [(0.1, 0.2, 0.3), (0.0, 0.2 + 1e-6, 0.4)])
def test_rounding_makes_no_reply_good_or_bad(scores: tuple[float, ...]) -> None:
    call = CallTokens(prompt=[1], completion=[2], logprobs=None)
    group = [
        ScoredTrajectory(trajectory_id=str(n), group="g", score=score, calls=[call])
        for n, score in enumerate(scores)
    ]
    told = {unit.trajectory_id: unit.labels for unit in labelled_examples(group, LABELS).units}
    assert told == {"0": (-1,), "2": (1,)}
    nearly = [replace(one, score=0.5 + one.score / 1e6) for one in group]
    with pytest.raises(NothingToTrainError, match="better or worse"):
        labelled_examples(nearly, LABELS)


def test_calls_of_policies_that_are_too_old_are_not_labelled() -> None:
    def one(name: str, score: float, version: int) -> ScoredTrajectory:
        call = CallTokens(prompt=[1], completion=[2], logprobs=None, policy_version=version)
        return ScoredTrajectory(trajectory_id=name, group="g", score=score, calls=[call])

    rows = [one("a", 0.0, 1), one("b", 1.0, 1), one("old", 5.0, 0)]
    examples = labelled_examples(rows, LABELS, {1: 0, 0: 2})
    assert examples.trajectory_ids == ("a", "b")


def test_no_prompt_meets_a_reply_with_which_it_exceeds_every_call() -> None:
    """All calls fit the model; a long prompt with the reply to a short one may not."""
    long = CallTokens(prompt=[1] * 28, completion=[2] * 4, logprobs=None)
    short = CallTokens(prompt=[3] * 4, completion=[2] * 28, logprobs=None)
    rows = [
        ScoredTrajectory(trajectory_id=str(n), group="g", score=float(n), calls=[call])
        for n, call in enumerate((long, short))
    ]
    mismatched = labelled_examples(rows, LABELS).mismatched.calls
    assert [len(one.prompt) + len(one.completion) for one in mismatched] == [32, 8]


def test_losses_agree_with_cases_computed_by_hand() -> None:
    """One pair of one-token replies whose margin is known: only the forward pass is a model's."""
    model = tiny_model(0)
    examples = paired_examples(prompts(count=1, replies=2), 0.0, 512)
    report = update(model, examples, learning_rate=1e-9)
    assert report.training_loss == pytest.approx(0.693147, abs=1e-5)  # margin 0: log 2
    report = update(tiny_model(0), examples, PreferenceConfig(loss="ipo", beta=0.25))
    assert report.training_loss == pytest.approx(4.0, abs=1e-5)  # (0 - 1 / 0.5)^2


def test_the_reference_is_the_model_before_the_update() -> None:
    model = tiny_model(0)
    examples = paired_examples(prompts(seed=Random(3).randrange(9)), 0.0, 512)
    before = PolicyForward(model).logprobs(examples.tree).logprobs
    seen: list[Any] = []

    class Peek(Kept):
        def save(self, state: Any) -> None:
            seen.append(state["reference"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    config = settings(learning_rate=1e-3, iterations=2)
    train_on_preferences(model, optimizer, examples, config, PreferenceConfig(), journal=Peek(99))
    assert torch.equal(seen[-1], before)
