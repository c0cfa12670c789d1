"""The bounds of an update, and the return to an earlier state beyond them."""

from babylon.training.grpo.diagnostics import (
    ALL,
    Tokens,
    TrainState,
    clip_fraction,
    kl_of_iteration,
)
from babylon.training.grpo.kept_state import put_back
from babylon.training.grpo.learning_rate import rate_factor, set_rate_factor
from babylon.training.grpo.losses import LOSSES

MOST_UNDONE = 20  # iterations of an update


def distance(state: TrainState, tokens: Tokens = ALL) -> float:
    """Return the distance from the parent, relative to the bounds at which training stops."""
    config, record = state.window.config, state.record
    moved = kl_of_iteration(record, tokens) / config.stop_kl
    if not LOSSES[config.loss].clip_is_far:
        return moved
    return max(moved, clip_fraction(record, tokens) / config.stop_clip_fraction)


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
    set_rate_factor(state.optimizer, factor / 2)
    (record.iteration, steps), record.step = record.kept_at, 0
    del record.losses[steps:], record.grad_norms[steps:]
    record.undone += 1
    if record.undone > MOST_UNDONE:
        raise FloatingPointError(
            f"{record.undone} times an iteration moved the policy too far, the last time with a"
            f" learning rate of {record.learning_rate:.1g}: lower LEARNING_RATE"
        )
    return not record.losses
