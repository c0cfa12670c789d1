"""What an update told, under ART's names and under ours."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from babylon.training.grpo.train_report import TrainReport

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtReport:
    """What is known of an update that another trainer made: some of what our own reports, under
    the same names. None: it did not tell."""

    training_loss: float | None
    entropy: float | None
    kl_after: float | None
    grad_norm: float | None
    train_steps: float | None

    trained_trajectories: int
    groups_without_signal: int
    calls: int
    tokens: int
    calls_unlogged: int  # left out: their tokens or logprobs are unknown
    calls_too_stale: int  # left out
    calls_with_secrets: int  # left out
    calls_redacted: int  # a secret in the prompt was replaced


def to_art(report: "TrainReport | ArtReport") -> dict[str, float]:
    """Our trainer's report, its numbers only; what ART has no name for goes under ``loss/``."""
    return {
        _ART_NAMES.get(name, f"loss/{name}"): float(value)
        for name, value in asdict(report).items()
        if isinstance(value, (int, float))
    }


def from_art(metrics: Mapping[str, float], counts: Mapping[str, int]) -> ArtReport:
    """A trainer's metrics, and what we counted ourselves when we sent the window."""
    told = ("training_loss", "entropy", "kl_after", "grad_norm", "train_steps")
    return ArtReport(**{name: metrics.get(_ART_NAMES[name]) for name in told}, **counts)  # type: ignore[arg-type]
