"""The figures of an update from preferences, as one flat record. Without torch."""

from dataclasses import dataclass

from babylon.training.grpo.train_report import TrainReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceReport:
    """The figures of an update from preferences. Names that ``TrainReport`` has mean the same.

    A pair's margin is the change of the better reply's log-probability since the update began, less
    the worse one's; that of a labelled reply is its change, times its label.
    """

    training_loss: float  # mean over train steps
    train_steps: int
    iterations: int
    iterations_undone: int
    stopped_early: bool
    share_kept: float  # of the update, less than 1 if it was drawn back to its bound
    trained_trajectories: int
    calls: int  # replies
    tokens: int
    pairs: int  # 0: the replies are labelled
    prompts_without_pairs: int  # sampled prompts whose replies are all worth the same
    accuracy_after: float  # share of the margins that are positive; without learning, a half
    margin_after: float  # mean, nats
    kl_after: float
    grad_norm: float
    learning_rate: float
    update_norm: float
    flat_tokens: int
    unique_tokens: int
    packing_ratio: float
    training_s: float
    trained_tokens_per_s: float
    oom_halvings: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The reports of both phases, and the trajectories that moved the policy."""

    scores: TrainReport | None
    preferences: PreferenceReport | None
    trajectory_ids: tuple[str, ...]
