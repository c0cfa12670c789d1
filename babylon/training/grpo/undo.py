"""The bounds of an update, and the return to an earlier state beyond them."""

from torch import Tensor

from babylon.training.grpo.diagnostics import (
    ALL,
    Tokens,
    TrainState,
    UpdateRecord,
    clip_fraction,
    kl_of_iteration,
)
from babylon.training.grpo.kept_state import keep, put_back
from babylon.training.grpo.learning_rate import rate_factor, set_rate_factor
from babylon.training.grpo.losses import LOSSES

MOST_UNDONE = 20  # iterations of an update
_FIGURES = ("theta", "entropy", "flags")


def distance(state: TrainState, tokens: Tokens = ALL) -> float:
    """Return the distance from the parent, relative to the bounds at which training stops."""
    config, record = state.window.config, state.record
    moved = kl_of_iteration(record, tokens) / config.stop_kl
    if not LOSSES[config.loss].clip_is_far:
        return moved
    return max(moved, clip_fraction(record, tokens) / config.stop_clip_fraction)


def figures_of(record: UpdateRecord) -> dict[str, Tensor]:
    """Copy the values of the last iteration."""
    return {name: getattr(record, name).to("cpu", copy=True) for name in _FIGURES}


def keep_iteration(state: TrainState, figures: dict[str, Tensor]) -> None:
    """Keep the state before an iteration, with the figures of the iteration before it."""
    record = state.record
    kept = keep(state.model, state.optimizer, record.kept)
    record.kept = kept | {"figures": figures}
    record.kept_at = record.iteration, len(record.losses)


def undo(state: TrainState) -> bool:
    """Return to the last state within the bounds. Return whether that is the parent.

    Nothing of the update is left then, so it starts again with half the learning rate.

    Raises:
        FloatingPointError: a millionth of the learning rate moves the policy too far.
    """
    record = state.record
    assert record.kept is not None  # the first step of every iteration keeps one
    factor = rate_factor(state.optimizer)
    put_back(record.kept, state.model, state.optimizer)
    begun = rate_factor(state.optimizer)
    for name, value in record.kept["figures"].items():  # the report is of what is left
        getattr(record, name).copy_(value)
    (record.iteration, steps), record.step = record.kept_at, 0
    del record.losses[steps:], record.grad_norms[steps:]
    if not record.losses:  # an attempt that adapted upwards must not be repeated as it was
        factor = min(factor, begun)
    set_rate_factor(state.optimizer, factor / 2)
    record.undone += 1
    if record.undone > MOST_UNDONE:
        raise FloatingPointError(
            f"{record.undone} times an iteration moved the policy too far, the last time with a"
            f" learning rate of {record.learning_rate:.1g}: lower LEARNING_RATE"
        )
    return not record.losses
