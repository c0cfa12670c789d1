"""The result of an update: its report, the calls left out of it, and both as flat metrics.

This module does not import torch, so that stages and trainers can import it at no cost.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from babylon.core.types import Metrics, Scored
from babylon.training.grpo.train_report import TrainReport
from babylon.training.preferences.preference_report import Learnt, PreferenceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Number of calls that cannot be trained, by reason."""

    greedy: int  # sampled below temperature 0.01: a point mass has no likelihood ratio
    truncated: int  # by top-p, top-k or min-p: the logged logprobs are not those of the sampling
    too_long: int  # longer than the model's context
    empty: int
    unknown_tokens: int = 0  # ids beyond the model's vocabulary: another model sampled them
    untrainable: int  # otherwise not sampled from the policy alone (penalties, a grammar, a cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtReport:
    """The report of one of ART's trainers: part of ``TrainReport``, under the same names.

    A figure that the trainer did not report is None.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """How well a policy writes the chats of ``RECALL_CHATS`` (``recall.py``), in nats a token.

    ``best``: the fewest of its line. ``chats``: digest of these and of the weights' precision.
    """

    nats: float
    best: float
    chats: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A trained window. ``trajectory_ids`` are the trajectories that moved the policy.

    ``report`` is of the first phase. ``preferences`` is of a second one (``OBJECTIVE=grpo+dpo``).
    ``recall``: with ``RECALL_CHATS``.
    """

    report: TrainReport | ArtReport | PreferenceReport
    excluded: Excluded
    trajectory_ids: tuple[str, ...]
    preferences: PreferenceReport | None = None
    recall: Recall | None = None


def update_of(learnt: Learnt, excluded: Excluded) -> Update:
    """The update of our own trainer."""
    first, second = learnt.scores or learnt.preferences, learnt.preferences
    assert first is not None  # an update without a phase raises
    return Update(
        report=first,
        excluded=excluded,
        trajectory_ids=learnt.trajectory_ids,
        preferences=second if learnt.scores else None,
    )


def update_metrics(update: Update, scored: Scored) -> Metrics:
    """The update's report and the number of calls left out of it, by reason.

    Numbers that are not finite become None, because JSON cannot hold them.
    """
    metrics: Metrics = {
        **asdict(update.report),
        **{f"preference_{name}": value for name, value in _second(update).items()},
        **{f"calls_{reason}": count for reason, count in asdict(update.excluded).items()},
        "kl_divergence": update.report.kl_after,
        "avg_reward": scored.avg_reward,
    }
    if update.recall is not None:
        metrics |= {"recall": update.recall.nats, "recall_best": update.recall.best}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def _second(update: Update) -> dict[str, Any]:
    return asdict(update.preferences) if update.preferences else {}


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


def to_art(report: TrainReport | ArtReport | PreferenceReport) -> dict[str, float]:
    """The report's numbers under ART's names. Figures unknown to ART go under ``loss/``."""
    return {
        _ART_NAMES.get(name, f"loss/{name}"): float(value)
        for name, value in asdict(report).items()
        if isinstance(value, (int, float))
    }


def from_art(metrics: Mapping[str, float], counts: Mapping[str, int]) -> ArtReport:
    """The report of an ART trainer: its metrics, and our own ``counts`` of what was sent."""

    names = ("training_loss", "entropy", "kl_after", "grad_norm", "train_steps")
    figures: dict[str, Any] = {name: metrics.get(_ART_NAMES[name]) for name in names}
    return ArtReport(**figures, **counts)
