"""One window's update on disk: parent checkpoint + scored calls → new checkpoint + report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from babylon.checkpoints.tokenizer import render_prompt
from babylon.checkpoints.trainable import Tuning, load_trainable, save_checkpoint
from babylon.errors import TrainingError, WindowNotReadyError
from babylon.grpo.advantage import advantages
from babylon.grpo.batch import CallTokens, ScoredTrajectory
from babylon.grpo.trainer import (
    NothingToTrainError,
    Progress,
    TrainerConfig,
    TrainReport,
    train_on_window,
)
from babylon.trajectories import Call, TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Calls that cannot be trained, by reason."""

    greedy: int  # sampled at temperature 0: a point mass has no likelihood ratio
    too_long: int  # beyond the model's context
    empty: int
    untrainable: int  # bent distribution (top-p, penalties) or interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of a window: ``trajectory_ids`` are those that moved the policy."""

    report: TrainReport
    excluded: Excluded
    trajectory_ids: tuple[str, ...]


def update_checkpoint(
    parent: Path | str,
    rows: Sequence[TrainingRow],
    target: Path,
    *,
    tuning: Tuning,
    config: TrainerConfig,
    progress: Progress | None = None,
) -> Update:
    """Train the parent policy on a window and save the result. Blocking, minutes on a GPU.

    Raises:
        WindowNotReadyError: the window teaches nothing; nothing was written.
        TrainingError: the update diverged; nothing was written.
        ModelError: the parent does not load.
    """
    trainable = load_trainable(parent, tuning, config.learning_rate)
    trajectories, excluded = scored_trajectories(trainable.tokenizer, rows, _context(trainable))
    reference = trainable.reference() if config.loss.kl_penalty else None
    try:
        report = train_on_window(
            trainable.model,
            trainable.optimizer,
            trajectories,
            config,
            reference=reference,
            progress=progress,
        )
    except NothingToTrainError as error:
        raise WindowNotReadyError(str(error)) from error
    except FloatingPointError as error:
        raise TrainingError(str(error)) from error
    save_checkpoint(trainable, target)
    return Update(report=report, excluded=excluded, trajectory_ids=tuple(advantages(trajectories)))


def scored_trajectories(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TrainingRow], context: int
) -> tuple[list[ScoredTrajectory], Excluded]:
    """Exact tokens where they were logged, else the logged text tokenised by the chat template."""
    counts = {"greedy": 0, "too_long": 0, "empty": 0, "untrainable": 0}
    trajectories = []
    for row in rows:
        calls = []
        for call in row.calls:
            tokens = _tokens(tokenizer, call, context)
            if isinstance(tokens, CallTokens):
                calls.append(tokens)
            else:
                counts[tokens] += 1
        if calls:
            trajectories.append(
                ScoredTrajectory(
                    trajectory_id=row.trajectory_id,
                    group=row.scenario_id,
                    score=row.score,
                    calls=calls,
                )
            )
    return trajectories, Excluded(**counts)


def _tokens(tokenizer: PreTrainedTokenizerBase, call: Call, context: int) -> CallTokens | str:
    """The call's tokens, or the name of the reason why it cannot be trained."""
    if call.temperature <= 0:
        return "greedy"
    if call.untrainable is not None or call.top_p < 1:
        return "untrainable"
    if call.prompt_token_ids is not None and call.completion_token_ids is not None:
        prompt, completion = call.prompt_token_ids, call.completion_token_ids
    else:
        prompt, completion = _retokenize(tokenizer, call)
    if not completion:
        return "empty"
    if len(prompt) + len(completion) > context:
        return "too_long"
    return CallTokens(
        prompt=prompt,
        completion=completion,
        logprobs=call.logprobs,
        temperature=call.temperature,
    )


def _retokenize(
    tokenizer: PreTrainedTokenizerBase, call: Call
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    messages = [{"role": m.role, "content": m.content} for m in call.messages]
    prompt = render_prompt(tokenizer, messages)
    reply = tokenizer.encode(call.response, add_special_tokens=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(prompt), (*reply, *end)


def _context(trainable: Any) -> int:
    return int(trainable.model.config.max_position_embeddings)
