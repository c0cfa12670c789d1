"""GRPO on one logged window. An iteration is one pass over it, a train step one optimiser update.

A train step trains whole trajectories. Their calls run in portions whose gradients add up: the
loss is divided by the step's denominator, never by a portion's. Training stops early once the
policy has moved far enough from the parent (k3 or clip fraction). An iteration that moved it much
too far is undone. Training then stops, or starts again with half the learning rate if nothing is
left of it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import (
    Logged,
    RecordState,
    TrainState,
    UpdateRecord,
    divergence,
    finite,
    kl_of_iteration,
    make_report,
    weight_sample,
)
from babylon.training.grpo.forward import (
    FittingForward,
    OutOfMemoryError,
    PolicyForward,
    fitting_forward,
    is_out_of_memory,
)
from babylon.training.grpo.learning_rate import adapt_rate, begin_rate, next_rate
from babylon.training.grpo.losses import loss_terms
from babylon.training.grpo.penalties import penalised
from babylon.training.grpo.ranks import ALONE, Ranks, logprobs_of_tree, own_share
from babylon.training.grpo.router_balance import RouterLossError
from babylon.training.grpo.shards import whole
from babylon.training.grpo.teacher import teacher_logprobs
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.training_window import (
    NothingToTrainError,
    TrainingWindow,
    TrainStep,
    refuse_missing_logprobs,
)
from babylon.training.grpo.tree_forward import Values, padded_places
from babylon.training.grpo.undo import distance, figures_of, keep_iteration, undo

Progress = Callable[[int, int], None]  # train steps done, and their highest possible number


class Journal(Protocol):
    """Storage of an update's progress, with its weights and its optimiser."""

    def restore(self) -> RecordState | None:
        """Restore weights and optimiser, and return the record's state. None: nothing saved."""

    def save(self, state: RecordState) -> None:
        """Save weights, optimiser and state, all of them or none."""


def train_on_window(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: TrainingWindow,
    *,
    reference: AbstractContextManager[object] | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> TrainReport:
    """Update ``model`` in place on one window.

    Args:
        reference: context in which ``model`` is the reference policy, for a KL penalty.
        journal: saves the progress, and resumes an interrupted update.
        ranks: the processes that share the work. All of them call this with equal arguments, and
            end with equal models and reports.

    Raises:
        NothingToTrainError: the window teaches nothing; the model is unchanged.
        FloatingPointError: the loss, gradient or trained policy is not finite, or every step moves
            the policy too far; discard the model.
        OutOfMemoryError: the smallest portion does not fit; discard the model.
    """
    refuse_missing_logprobs(window)
    state = _begin(model, optimizer, window, reference, journal, ranks)
    _iterate(state, journal, progress)
    after = finite(logprobs_of_tree(state.fitting, window.tree, ranks))
    # Train steps see how far the steps before them went, and nothing has seen the last ones yet.
    again = True
    while again and divergence(state.record.proximal, after)[1] > window.config.kl_limit:
        if again := undo(state):
            _iterate(state, journal, progress)
        after = finite(logprobs_of_tree(state.fitting, window.tree, ranks))
    if not state.record.grad_norms:
        raise NothingToTrainError(
            f"every one of the {window.tokens} tokens is masked: the logged logprobs are not those"
            " of the trained policy; compare their versions and tokenizers"
        )
    if window.config.iterations == window.steps_an_iteration == 1:  # no step has seen its effect
        adapt_rate(optimizer, window.config, divergence(state.record.proximal, after)[1], 1.0)
    state.fitting.remember(optimizer.param_groups)
    return make_report(state, after=after)


def _iterate(state: TrainState, journal: Journal | None, progress: Progress | None) -> None:
    """Train until the policy has moved far, or the last iteration is done."""
    record, window, config = state.record, state.window, state.window.config
    iterations, steps = config.iterations, window.steps_an_iteration
    while record.iteration <= iterations:
        for step in window.steps(record.iteration)[record.step :]:
            if not train_step(state, step):
                if undo(state):
                    break  # the first iteration again
                return
            done = (record.iteration - 1) * steps + record.step
            if progress is not None:
                progress(done, iterations * steps)
            # The last step is not saved: the checkpoint that follows holds it.
            if journal is not None and done < iterations * steps:
                journal.save(record.state())
        else:
            record.iteration, record.step = record.iteration + 1, 0
            if distance(state) > 1:
                return
            share = (record.iteration - 2 + (steps - 1) / (2 * steps)) / iterations
            if record.losses:  # else every token is masked, which tells nothing of the rate
                adapt_rate(state.optimizer, config, kl_of_iteration(record), share)


def _begin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: TrainingWindow,
    reference: AbstractContextManager[object] | None,
    journal: Journal | None,
    ranks: Ranks,
) -> TrainState:
    if window.config.router_loss and ranks.size > 1:
        raise RouterLossError("ROUTER_AUX_LOSS needs one process: set TRAIN_PROCESSES=1")
    device = next(model.parameters()).device
    begin_rate(optimizer, window.config)
    logged = Logged.of(window, device)
    fitting = fitting_forward(model, window.config, optimizer.param_groups)
    saved = None if journal is None else journal.restore()
    if saved is None:
        record = _frozen_policies(model, window, fitting, logged, reference, ranks)
    else:
        record = UpdateRecord.from_state(saved, device)
        fitting.restore(record.halvings)
    return TrainState(model, optimizer, window, fitting, logged, record, ranks)


def _frozen_policies(
    model: nn.Module,
    window: TrainingWindow,
    fitting: FittingForward,
    logged: Logged,
    reference: AbstractContextManager[object] | None,
    ranks: Ranks,
) -> UpdateRecord:
    """A new record with the logprobs of p, reference and teacher, computed once an update.

    If an iteration is one step, p costs nothing: the first iteration's forward pass is p's.
    """
    anchored = None
    if window.config.kl_penalty:
        if reference is None:
            raise ValueError("a KL penalty needs a reference policy")
        with reference:
            anchored = logprobs_of_tree(fitting, window.tree, ranks)
    proximal = torch.zeros_like(logged.mu)
    if window.steps_an_iteration > 1:
        proximal = logprobs_of_tree(fitting, window.tree, ranks)
    teacher = teacher_logprobs(window, logged, fitting, ranks)
    return UpdateRecord.start(proximal, anchored, weight_sample(model), teacher)


def train_step(state: TrainState, step: TrainStep) -> bool:
    """Update the model by one step, unless all of the step's tokens are masked.

    The step's forward pass shows how far the steps before it have moved the policy. Return False,
    and leave the model alone, if that is so far that they must be undone.

    Raises:
        FloatingPointError: loss or gradient is not finite; discard the model.
        OutOfMemoryError: the smallest portion or the optimiser's moments do not fit.
    """
    started, record = time.monotonic(), state.record
    figures = figures_of(record) if record.step == 0 else {}
    tokens = state.logged.tokens_of(step.calls)
    total = _forward_and_backward(state, step, tokens)
    if not torch.isfinite(total):
        raise FloatingPointError(f"loss is {total.item()}: lower the learning rate")
    if distance(state, tokens) > state.window.config.undo_factor:
        return False
    if record.step == 0:
        keep_iteration(state, figures)
    if record.flags[:3, tokens].any(0).all():  # skip: Adam's moments would move the model
        state.optimizer.zero_grad(set_to_none=True)
    else:
        norm, record.learning_rate = optimizer_step(
            state.optimizer, state.window.config, state.ranks
        )
        record.grad_norms.append(norm)
        record.losses.append(float(total))
    record.step += 1
    record.halvings = state.fitting.halvings
    record.forwarded_tokens += step.tree.unique_tokens
    record.trained_tokens += sum(len(call.completion) for call in step.tree.calls)
    record.training_s += time.monotonic() - started
    return True


def _forward_and_backward(state: TrainState, step: TrainStep, tokens: Tensor) -> Tensor:
    """Return the step's loss. Every rank then has the figures of all of the step's tokens.

    Gradients stay those of the rank's own calls.
    """
    own, ranks = own_share(step.tree, state.ranks), state.ranks
    total = state.fitting.run(lambda forward: _accumulate(state, step, own, forward))
    if ranks.size > 1:
        # portions of equal size on all ranks, because one of them saves the size for the next time
        state.fitting.restore(ranks.most(state.fitting.halvings))
        mine = state.logged.tokens_of([step.calls[call] for call in own])
        state.record.exchange(tokens, torch.isin(tokens, mine), ranks.add)
        ranks.add(total)
    return total


def _accumulate(
    state: TrainState, step: TrainStep, own: Sequence[int], forward: PolicyForward
) -> Tensor:
    state.optimizer.zero_grad(set_to_none=True)  # clear an attempt that did not fit
    rows = torch.tensor(step.calls, device=state.record.theta.device)
    config, record = state.window.config, state.record
    p_is_free = record.iteration == state.window.steps_an_iteration == 1
    weights = torch.tensor(step.weights, device=rows.device)
    total = torch.zeros((), device=rows.device)

    def loss(calls: Sequence[int], values: Values) -> Tensor:
        chosen = torch.tensor([own[call] for call in calls], device=rows.device)
        if p_is_free:  # the model has not moved yet, so theta is p
            places, mask = padded_places(state.logged.offsets, rows[chosen])
            record.proximal[places[mask]] = values.logprobs.detach()[mask]
        inputs = record.inputs(state.logged, rows[chosen], values)
        terms = loss_terms(config.loss, inputs, config.bounds)
        terms = penalised(terms, inputs, config, state.window.signal)
        record.note(state.logged, rows[chosen], values, terms)
        share = (terms.loss.sum(-1) * weights[chosen]).sum()
        total.add_(share.detach())
        return share

    if len(own) == len(step.calls):
        forward.accumulate(step.tree, loss)
    elif own:
        forward.accumulate(step.tree.only(own), loss)
    return total


def optimizer_step(
    optimizer: torch.optim.Optimizer, config: TrainerConfig, ranks: Ranks
) -> tuple[float, float]:
    """Sum the ranks' gradients, clip and step. Return the norm and the learning rate."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ranks.add_gradients(parameters)
    norm = whole(torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip))
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()}: lower the learning rate")
    rate = next_rate(optimizer, config)
    try:
        optimizer.step()
    except (RuntimeError, MemoryError) as error:  # no retry: half a step may have been taken
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "out of memory in the optimiser, whose moments take twice the memory of the tuned"
            f" weights ({error}): train with TUNING=lora, a smaller BASE_MODEL, or more memory"
        ) from error
    optimizer.zero_grad(set_to_none=True)
    return float(norm), rate
