"""DPO and KTO on a prefix tree: shared prompts are forwarded once for all replies to them.

A loss of preferences compares replies that may lie in different portions of the tree. A train step
therefore has two passes: the first computes every reply's log-probability, from which the loss and
its derivative ``g_c`` by each reply follow; the second back-propagates ``sum_c g_c * theta_c``,
portion by portion. The gradient is exact. The first pass of an update is also that of the
reference, so it costs nothing more until the policy has moved.

As with GRPO, the update stops once the policy has moved far from where it began, and starts again
with half the learning rate if it has moved much too far. Unlike GRPO, these losses have no clip,
and all their steps push the same way. An update that ends beyond ``stop_kl`` is therefore drawn
back to it on the straight line to where it began, as in the line search of TRPO (Schulman et al.
2015, arXiv 1502.05477, appendix C).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import (
    divergence,
    on_device,
    update_norm,
    weight_sample,
)
from babylon.training.grpo.forward import FittingForward, PolicyForward
from babylon.training.grpo.kept_state import Kept, draw_back, keep, put_back
from babylon.training.grpo.learning_rate import (
    adapt_rate,
    begin_rate,
    rate_factor,
    set_rate_factor,
)
from babylon.training.grpo.prefix_tree import PrefixTree, find_sharing
from babylon.training.grpo.ranks import ALONE, Ranks, logprobs_of_tree, own_share
from babylon.training.grpo.trainer import Journal, Progress, optimizer_step
from babylon.training.grpo.tree_forward import Values
from babylon.training.grpo.undo import MOST_UNDONE
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.preferences.examples import Examples, Unit
from babylon.training.preferences.losses import pair_loss, unpaired_loss
from babylon.training.preferences.preference_report import PreferenceReport

PHASE = "preferences"  # in the record of a saved progress


@dataclass(slots=True, kw_only=True)
class PreferenceRecord:
    """The state of an update besides weights and optimiser. ``state`` and the field names are
    those of saved progress."""

    reference: Tensor  # [N] logprobs of all replies' tokens, when the update began
    others: Tensor  # [C] their sums for the replies of other prompts; KTO only
    theta: Tensor  # [N] of the last pass over each reply
    kept: Kept  # where the update began
    weights_before: list[Tensor]
    before: dict[str, Any]  # what the phase before this one reported
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    iteration: int = 1
    step: int = 0
    learning_rate: float = 0.0
    undone: int = 0
    halvings: int = 0
    training_s: float = 0.0
    trained_tokens: int = 0
    phase: str = PHASE

    def state(self) -> dict[str, Any]:
        """The record as a dictionary for ``torch.save``."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Training:
    """A running update. Model, optimiser, fitting and record change in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    examples: Examples
    config: TrainerConfig
    options: PreferenceConfig
    fitting: FittingForward
    record: PreferenceRecord
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        return self.record.reference.device


def train_on_preferences(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    config: TrainerConfig,
    options: PreferenceConfig,
    *,
    saved: dict[str, Any] | None = None,
    before: dict[str, Any] | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> PreferenceReport:
    """Update ``model`` in place.

    Args:
        saved: the state of an interrupted update of the same examples. Weights and optimiser have
            been restored.
        before: what an earlier phase of the same update reported; it is saved with the progress.
        ranks: the processes that share the work.

    Raises:
        FloatingPointError: loss or gradient is not finite, or every step moves the policy too far;
            discard the model.
        OutOfMemoryError: the smallest portion does not fit; discard the model.
    """
    fitting = FittingForward(
        model,
        config.max_tokens,
        optimizer.param_groups,
        checkpointing=config.activation_checkpointing,
    )
    if saved is None:
        begin_rate(optimizer, config)  # a restored optimiser has a rate that undoing has lowered
        record = _begin(model, optimizer, examples, fitting, before or {}, ranks)
    else:
        device = next(model.parameters()).device
        record = PreferenceRecord(**on_device(saved, device))
        fitting.restore(record.halvings)
    training = _Training(model, optimizer, examples, config, options, fitting, record, ranks)
    # A step sees how far the steps before it went. Nothing has seen the last ones yet.
    while True:
        _iterate(training, journal, progress)
        after = logprobs_of_tree(fitting, examples.tree, ranks)
        if divergence(record.reference, after)[1] <= config.kl_limit:
            break
        _start_again(training)
    if config.iterations == len(record.losses) == 1:  # no step has seen its effect
        adapt_rate(optimizer, config, divergence(record.reference, after)[1], 1.0)
    share, after = _within_bound(training, after)
    fitting.remember(optimizer.param_groups)
    return _report(training, after, share)


def _begin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    fitting: FittingForward,
    before: dict[str, Any],
    ranks: Ranks,
) -> PreferenceRecord:
    reference = logprobs_of_tree(fitting, examples.tree, ranks)
    others = torch.zeros(0)
    if examples.units[0].labels:
        tree = examples.mismatched
        others = _sums(tree, logprobs_of_tree(fitting, tree, ranks))
    return PreferenceRecord(
        reference=reference,
        others=others,
        theta=reference.clone(),
        kept=keep(model, optimizer),
        weights_before=weight_sample(model),
        before=before,
    )


def _iterate(training: _Training, journal: Journal | None, progress: Progress | None) -> None:
    """Train until the policy has moved far, or the last iteration is done."""
    record, config, examples = training.record, training.config, training.examples
    while record.iteration <= config.iterations:
        steps = examples.steps(config, record.iteration)
        for units in steps[record.step :]:
            if _train_step(training, units) > config.kl_limit:
                _start_again(training)
                break
            done = (record.iteration - 1) * len(steps) + record.step
            if progress is not None:
                progress(done, config.iterations * len(steps))
            if journal is not None and done < config.iterations * len(steps):
                journal.save(record.state())
        else:
            record.iteration, record.step = record.iteration + 1, 0
            moved = divergence(record.reference, record.theta)[1]
            if moved > config.stop_kl:
                return
            share = (record.iteration - 2 + (len(steps) - 1) / (2 * len(steps))) / config.iterations
            adapt_rate(training.optimizer, config, moved, share)


def _start_again(training: _Training) -> None:
    """Return to where the update began, with half the learning rate.

    Raises:
        FloatingPointError: a millionth of the learning rate moves the policy too far.
    """
    record, optimizer = training.record, training.optimizer
    factor = rate_factor(optimizer)
    put_back(record.kept, training.model, optimizer)
    # The rate may have risen since the attempt began. Half of it could be the same attempt again.
    set_rate_factor(optimizer, min(factor, rate_factor(optimizer)) / 2)
    record.kept = keep(training.model, optimizer, record.kept)
    record.theta = record.reference.clone()
    record.losses, record.grad_norms = [], []
    record.iteration, record.step = 1, 0
    record.undone += 1
    if record.undone > MOST_UNDONE:
        raise FloatingPointError(
            f"{record.undone} times the preferences moved the policy too far, the last time with a"
            f" learning rate of {record.learning_rate:.1g}: lower LEARNING_RATE"
        )


def _within_bound(training: _Training, after: Tensor) -> tuple[float, Tensor]:
    """Draw the update back to ``stop_kl`` → the share of it that is left, all tokens' logprobs."""
    record, bound, left = training.record, training.config.stop_kl, 1.0
    while (moved := divergence(record.reference, after)[1]) > bound:
        # The divergence grows with the square of the distance; the rest is for what is not square.
        share = 0.98 * (bound / moved) ** 0.5
        draw_back(record.kept, training.model, share)
        left *= share
        after = logprobs_of_tree(training.fitting, training.examples.tree, training.ranks)
    return left, after


def _train_step(training: _Training, units: Sequence[Unit]) -> float:
    """Update the model by one step; return how far the steps before it have moved the policy.

    Beyond the bound of undoing, nothing is updated.
    """
    started, record, examples = time.monotonic(), training.record, training.examples
    calls = sorted(call for unit in units for call in unit.calls)
    whole = len(calls) == len(examples.calls)
    tree = examples.tree if whole else examples.tree.only(calls)
    places = _places(examples.tree, calls, training.device)
    if record.losses:  # before the first step the policy is the reference
        record.theta[places] = logprobs_of_tree(training.fitting, tree, training.ranks)
    moved = divergence(record.reference[places], record.theta[places])[1]
    if moved > training.config.kl_limit:
        return moved
    loss, slopes = _loss_of_step(training, units, calls, tree)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()}: lower the learning rate")
    _accumulate(training, tree, slopes)
    norm, record.learning_rate = optimizer_step(training.optimizer, training.config, training.ranks)
    record.grad_norms.append(norm)
    record.losses.append(float(loss))
    record.step += 1
    record.halvings = training.fitting.halvings
    record.trained_tokens += len(places)
    record.training_s += time.monotonic() - started
    return moved


def _places(tree: PrefixTree, calls: Sequence[int], device: torch.device) -> Tensor:
    runs = [torch.arange(*tree.offsets[call : call + 2].tolist()) for call in calls]
    return torch.cat(runs).to(device)


def _sums(tree: PrefixTree, values: Tensor) -> Tensor:
    """Each call's sum ``[C]`` of a table of token values ``[N]``, in fp64."""
    lengths = torch.from_numpy(tree.offsets).diff().to(values.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    total = torch.zeros(len(lengths), dtype=torch.float64, device=values.device)
    return total.index_add_(0, owner, values.double())


def _loss_of_step(
    training: _Training, units: Sequence[Unit], calls: Sequence[int], tree: PrefixTree
) -> tuple[Tensor, Tensor]:
    """The step's loss, and its derivative by the log-probability of each of its calls ``[n]``."""
    record, options = training.record, training.options
    at = _places(training.examples.tree, calls, training.device)
    theta = _sums(tree, record.theta[at]).requires_grad_()
    reference = _sums(tree, record.reference[at])
    row = {call: number for number, call in enumerate(calls)}
    if units[0].pairs:
        pairs = [(row[better], row[worse]) for unit in units for better, worse in unit.pairs]
        lengths = torch.from_numpy(tree.offsets).diff().to(theta)
        index = torch.tensor(pairs, device=training.device)
        loss = pair_loss(theta, reference, lengths, index, options)
    else:
        label = {c: y for unit in units for c, y in zip(unit.calls, unit.labels, strict=True)}
        labels = torch.tensor([label[call] for call in calls]).to(theta)
        weight = training.examples.label_weights
        weights = torch.tensor([weight[label[call]] for call in calls]).to(theta)
        mismatch = _mismatch(training, calls)
        loss = unpaired_loss(theta, reference, mismatch, labels, weights, options)
    loss.backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    return loss.detach(), theta.grad


def _mismatch(training: _Training, calls: Sequence[int]) -> Tensor:
    """``theta - reference`` ``[n]`` of the calls' prompts with replies to other prompts.

    KTO's estimate of the divergence. Before the policy has moved there is none.
    """
    if not training.record.losses:
        return torch.zeros(0, device=training.device)
    tree = training.examples.mismatched.only(calls)
    now = _sums(tree, logprobs_of_tree(training.fitting, tree, training.ranks))
    return now - training.record.others[list(calls)]


def _accumulate(training: _Training, tree: PrefixTree, slopes: Tensor) -> None:
    """Add the gradient of ``sum_c slope_c * theta_c`` over this rank's share of the calls."""
    own = own_share(tree, training.ranks)

    def loss(calls: Sequence[int], values: Values) -> Tensor:
        chosen = torch.tensor([own[call] for call in calls], device=slopes.device)
        total: Tensor = (values.logprobs.sum(-1) * slopes[chosen].to(values.logprobs)).sum()
        return total

    def attempt(forward: PolicyForward) -> None:
        training.optimizer.zero_grad(set_to_none=True)  # clear an attempt that did not fit
        if len(own) == len(tree.calls):
            forward.accumulate(tree, loss)
        elif own:
            forward.accumulate(tree.only(own), loss)

    training.fitting.run(attempt)
    training.fitting.restore(training.ranks.most(training.fitting.halvings))


def _report(training: _Training, after: Tensor, share: float) -> PreferenceReport:
    examples, record, config = training.examples, training.record, training.config
    moved = _sums(examples.tree, after) - _sums(examples.tree, record.reference)
    pairs = [pair for unit in examples.units for pair in unit.pairs]
    # Margins are relative to where the update began: absolute ones say which reply is shorter.
    if pairs:
        better, worse = torch.tensor(pairs, device=moved.device).unbind(-1)
        margins = moved[better] - moved[worse]
    else:
        labels = [y for unit in examples.units for y in unit.labels]
        margins = moved[[c for unit in examples.units for c in unit.calls]] * torch.tensor(
            labels, device=moved.device
        )
    sharing = find_sharing(examples.tree)
    return PreferenceReport(
        training_loss=fmean(record.losses),
        train_steps=len(record.losses),
        iterations=record.iteration - 1,
        iterations_undone=record.undone,
        stopped_early=record.iteration <= config.iterations,
        share_kept=share,
        trained_trajectories=len(examples.trajectory_ids),
        calls=len(examples.calls),
        tokens=int(examples.tree.offsets[-1]),
        pairs=len(pairs),
        prompts_without_pairs=examples.prompts_without_pairs,
        accuracy_after=float((margins > 0).double().mean()),
        margin_after=float(margins.mean()),
        kl_after=divergence(record.reference, after)[1],
        grad_norm=fmean(record.grad_norms),
        learning_rate=record.learning_rate,
        update_norm=update_norm(training.model, record.weights_before),
        flat_tokens=sharing.flat_tokens,
        unique_tokens=sharing.unique_tokens,
        packing_ratio=sharing.flat_tokens / max(1, sharing.unique_tokens),
        training_s=record.training_s,
        trained_tokens_per_s=record.trained_tokens / max(record.training_s, 1e-9),
        oom_halvings=training.fitting.halvings,
        max_tokens=training.fitting.forward.max_tokens,
    )
