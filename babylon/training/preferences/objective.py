"""The objective of an update: the window's scores, preferences, or the one after the other.

``grpo``: the scores of a window's groups. ``sdpo``: feedback in words on the logged calls, by
self-distillation, whatever their scores. ``grpo+sdpo``: both in every train step. ``dpo``: pairs of
sampled replies. ``kto``: the logged calls, good or bad. ``grpo+dpo``: both, in one checkpoint; the
pairs are learnt from the policy that the scores lead to. If one of them teaches nothing, the other
goes on alone.

Progress is saved in one file. Once the second phase has begun, it holds the report of the first.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace

from babylon.core.learning_settings import Objective
from babylon.core.preferences import DecisionWords, PromptReplies
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.ranks import ALONE, Ranks
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.trainer import Journal, Progress, train_on_window
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, compile_window
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.preferences.examples import Examples, labelled_examples, paired_examples
from babylon.training.preferences.preference_report import Learnt
from babylon.training.preferences.trainer import PHASE, train_on_preferences
from babylon.training.trainable import Trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The objective of an update, and the sampled replies or the words that it can use."""

    objective: Objective = "grpo"
    options: PreferenceConfig = field(default_factory=PreferenceConfig)
    replies: tuple[PromptReplies, ...] = ()
    words: tuple[DecisionWords, ...] = ()


SCORES_ONLY = Preferences()


def learn(
    trainable: Trainable,
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    preferences: Preferences,
    *,
    context: int,
    staleness: Mapping[int, int],
    reference: AbstractContextManager[object] | None,
    journal: Journal | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Learnt:
    """Update the model in place by the objective.

    Args:
        context: longest call in tokens.
        reference: context in which the model is the reference policy, for a KL penalty.

    Raises:
        NothingToTrainError: no phase has anything to learn from; the model is unchanged.
        FloatingPointError, OutOfMemoryError: as ``train_on_window``; discard the model.
    """
    objective, options, scores = preferences.objective, preferences.options, None
    ids: tuple[str, ...] = ()
    why = ""
    logged_only = objective in ("grpo", "sdpo", "grpo+sdpo")
    if objective == "sdpo":
        _require_words(trajectories)
        # equal scores have no advantages
        trajectories = [replace(own, score=0.0, rewards={}) for own in trajectories]
    saved = None if journal is None or logged_only else journal.restore()
    if saved is not None and saved.get("phase") != PHASE:
        saved = None  # of the first phase, which restores it by itself
    # A second phase that was interrupted holds what the first one reported: it does not run again.
    if saved and saved["before"]:
        scores, ids = TrainReport(**saved["before"]["scores"]), saved["before"]["trajectory_ids"]
    elif (logged_only or objective == "grpo+dpo") and not saved:
        try:
            window = compile_window(trajectories, config, staleness=staleness)
            scores = train_on_window(
                trainable.model,
                trainable.optimizer,
                window,
                reference=reference,
                journal=journal,
                progress=progress,
                ranks=ranks,
            )
            ids = tuple(window.trajectory_ids)
        except NothingToTrainError as error:
            if logged_only:
                raise
            why = f"; {error}"
    if logged_only:
        return Learnt(scores=scores, preferences=None, trajectory_ids=ids)
    try:
        examples = _examples(preferences, trajectories, config, staleness, context)
    except NothingToTrainError as error:
        if scores is None:
            raise NothingToTrainError(f"{error}{why}") from error
        return Learnt(scores=scores, preferences=None, trajectory_ids=ids)
    before = {"scores": asdict(scores), "trajectory_ids": ids} if scores else {}
    report = train_on_preferences(
        trainable.model,
        trainable.optimizer,
        examples,
        config,
        options,
        saved=saved,
        before=before,
        journal=journal,
        progress=progress,
        ranks=ranks,
    )
    both = tuple(dict.fromkeys((*ids, *examples.trajectory_ids)))
    return Learnt(scores=scores, preferences=report, trajectory_ids=both)


def _require_words(trajectories: Sequence[ScoredTrajectory]) -> None:
    if not any(call.hindsight for own in trajectories for call in own.calls):
        raise NothingToTrainError(
            f"none of the {len(trajectories)} trajectories has feedback in words and messages that"
            " give its recorded prompt again: use a judge, give feedback, or set OBJECTIVE=grpo"
        )


def _examples(
    preferences: Preferences,
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    staleness: Mapping[int, int],
    context: int,
) -> Examples:
    if preferences.objective == "kto":
        return labelled_examples(trajectories, config, staleness)
    return paired_examples(preferences.replies, preferences.options.margin, context)
