"""Figures of an update under ART's names and under ours."""

from collections.abc import Mapping
from dataclasses import asdict

from babylon.training.grpo.train_report import TrainReport
from babylon.training.update_result import ArtReport

GRADIENT_STEPS = "data/step_num_gradient_steps"  # the job's total, repeated in every record
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


def to_art(report: TrainReport | ArtReport) -> dict[str, float]:
    """The report's numbers under ART's names. Figures unknown to ART go under ``loss/``."""
    return {
        _ART_NAMES.get(name, f"loss/{name}"): float(value)
        for name, value in asdict(report).items()
        if isinstance(value, (int, float))
    }


def from_art(metrics: Mapping[str, float], counts: Mapping[str, int]) -> ArtReport:
    """The report of an ART trainer: its metrics, and our own ``counts`` of what was sent."""

    def figure(name: str) -> float | None:
        return metrics.get(_ART_NAMES[name])

    return ArtReport(
        training_loss=figure("training_loss"),
        entropy=figure("entropy"),
        kl_after=figure("kl_after"),
        grad_norm=figure("grad_norm"),
        train_steps=figure("train_steps"),
        **counts,
    )
