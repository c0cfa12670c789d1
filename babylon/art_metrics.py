"""What an update told, under ART's names and under ours."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from babylon.grpo.report import TrainReport

GRADIENT_STEPS = "data/step_num_gradient_steps"  # how many there are, told with each of them
TRAINABLE_GROUPS = "data/step_num_groups_trainable"
_ART_NAMES = {
    "training_loss": "loss/train",
    "entropy": "loss/entropy",
    "kl_after": "loss/kl_div",
    "grad_norm": "loss/grad_norm",
    "train_steps": GRADIENT_STEPS,
    "tokens": "data/step_trainer_tokens",
    "trained_trajectories": "data/step_num_trajectories",
}
_OUR_NAMES = {theirs: ours for ours, theirs in _ART_NAMES.items()}


def to_art(report: "TrainReport") -> dict[str, float]:
    """Our trainer's report, its numbers only; what ART has no name for goes under ``loss/``."""
    return {
        _ART_NAMES.get(name, f"loss/{name}"): float(value)
        for name, value in asdict(report).items()
        if isinstance(value, (int, float))
    }


def from_art(metrics: Mapping[str, float]) -> dict[str, float]:
    """Another trainer's metrics; what we have no name for goes under ``art/``."""
    return {_OUR_NAMES.get(name, f"art/{name}"): float(value) for name, value in metrics.items()}
