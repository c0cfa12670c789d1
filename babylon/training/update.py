"""One window's update on disk: parent checkpoint + scored calls → new checkpoint + report."""

import gc
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.text import redact
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.layers import TransferLayers
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.training.backends.art_metrics import ArtReport
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.memory import FittingForward, OutOfMemoryError
from babylon.training.grpo.prefix_tree import Decode
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.trainer import Progress, train_on_window
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, Window, compile_window
from babylon.training.trainable import Tuning, load_trainable, save_checkpoint
from babylon.training.update_progress import ProgressDirectory, update_digest

_TRUNCATING = ("top_p", "top_k", "min_p")  # as the gateway names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Calls that cannot be trained, by reason."""

    greedy: int  # sampled at temperature 0: a point mass has no likelihood ratio
    truncated: int  # by top-p or top-k: the logged logprobs are not those of the sampling
    too_long: int  # beyond the model's context
    empty: int
    untrainable: int  # otherwise bent (penalties, a grammar), or interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of a window: ``trajectory_ids`` are those that moved the policy."""

    report: TrainReport | ArtReport
    excluded: Excluded
    trajectory_ids: tuple[str, ...]


def update_checkpoint(
    parent: Path | str,
    rows: Sequence[TrainingRow],
    target: Path,
    *,
    tuning: Tuning,
    config: TrainerConfig,
    transfer_layers: TransferLayers = "all",
    staleness: Mapping[int, int] | None = None,
    behaviours: Mapping[int, str] | None = None,
    progress_directory: Path | None = None,
    progress: Progress | None = None,
) -> Update:
    """Train the parent policy on a window and save the result. Blocking, minutes on a GPU.

    Args:
        staleness: policy version → how many updates it lies behind the parent.
        behaviours: policy version → checkpoint, for calls whose logprobs were not logged.
        progress_directory: where an interrupted update of the same window goes on from.

    Raises:
        WindowNotReadyError: the window teaches nothing; nothing was written.
        TrainingError: the update diverged, or does not fit into memory; nothing was written.
        ModelError: the parent or a behaviour policy does not load.
    """
    trainable = load_trainable(parent, tuning, config.learning_rate, transfer_layers)
    trajectories, excluded = scored_trajectories(trainable.tokenizer, rows, _context(trainable))
    reference = trainable.reference() if config.kl_penalty else None
    journal = None
    if progress_directory is not None:
        decides = {
            "parent": str(parent),
            "tuning": tuning,
            "transfer_layers": transfer_layers,
            "config": config,
            "staleness": sorted((staleness or {}).items()),
            "behaviours": sorted((behaviours or {}).items()),
        }
        digest = update_digest(rows, decides)
        journal = ProgressDirectory(progress_directory, digest, trainable)
    try:
        window = compile_window(
            trajectories, config, staleness=staleness, decode=_quoting(trainable.tokenizer)
        )
        window = with_behaviours(window, behaviours or {})
        report = train_on_window(
            trainable.model,
            trainable.optimizer,
            window,
            reference=reference,
            journal=journal,
            progress=progress,
        )
    except NothingToTrainError as error:
        _forget(journal)
        raise WindowNotReadyError(str(error)) from error
    except FloatingPointError as error:
        _forget(journal)
        raise TrainingError(str(error)) from error
    except OutOfMemoryError as error:  # where there is more memory, the update can go on
        raise TrainingError(str(error)) from error
    save_checkpoint(trainable, target)
    _forget(journal)
    return Update(report=report, excluded=excluded, trajectory_ids=tuple(window.trajectory_ids))


def _quoting(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Token ids → text that may be shown: the advice on prompt order quotes it."""
    return lambda ids: redact(str(tokenizer.decode(list(ids))))


def _forget(journal: ProgressDirectory | None) -> None:
    if journal is not None:
        journal.remove()


def with_behaviours(window: Window, behaviours: Mapping[int, str]) -> Window:
    """The window with the logprobs of unlogged calls recomputed under the policy that made them.

    Each policy is loaded once, and freed before the next.
    """
    missing: dict[int, list[int]] = defaultdict(list)
    for position, call in enumerate(window.calls):
        version = call.tokens.policy_version
        if call.tokens.logprobs is None and version is not None and version in behaviours:
            missing[version].append(position)
    logprobs: dict[int, list[float]] = {}
    for version, positions in sorted(missing.items()):
        logprobs |= _logprobs_under(behaviours[version], window, positions)
        gc.collect()  # a model is a web of cycles, and the next one needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return window.with_logprobs(logprobs) if logprobs else window


def _logprobs_under(
    checkpoint: str, window: Window, positions: Sequence[int]
) -> dict[int, list[float]]:
    model, _ = load_policy(checkpoint)
    tree = window.tree.only(positions)
    fitting = FittingForward(model, window.config.max_tokens)
    values = fitting.run(lambda forward: forward.logprobs(tree)).logprobs.tolist()
    return {
        position: row[: len(window.calls[position].tokens.completion)]
        for position, row in zip(positions, values, strict=True)
    }


def scored_trajectories(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TrainingRow], context: int
) -> tuple[list[ScoredTrajectory], Excluded]:
    """Exact tokens where they were logged, else the logged text tokenised by the chat template."""
    counts = dict.fromkeys(Excluded.__slots__, 0)
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
    if call.top_p < 1 or any(cut in (call.untrainable or "") for cut in _TRUNCATING):
        return "truncated"
    if call.untrainable is not None:
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
        policy_version=call.policy_version,
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
    """Tokens that the model was made for; there are models without such a bound."""
    return int(getattr(trainable.model.config, "max_position_embeddings", sys.maxsize))
