"""Stage ``train``: one update of the champion, committed as the next policy version."""

import asyncio
from pathlib import Path

from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.trajectories import training_rows
from babylon.core.types import Claim, Scored, Trained
from babylon.policies import shared_files as files
from babylon.stages.champion import ensure_champion
from babylon.stages.siblings import make_update
from babylon.stages.update_sources import optimizer_of, staleness_of
from babylon.store.connection import Store, guarded
from babylon.store.policies import Policy, commit_policy, next_batch, policy_of_window
from babylon.training.backends.train_input import Progress, TrainInput
from babylon.training.progress_directory import claim_name, forget_progress, take_up_progress


async def train_window(
    store: Store,
    settings: Settings,
    scored: Scored,
    *,
    progress: Progress | None = None,
    member: int | None = None,
) -> Trained | None:
    """Train the champion on a window, save the checkpoint, commit it as the next policy version.

    With ``member``, train only this one of a population, and commit nothing.

    The commit also consumes the trajectories that moved the policy: they cannot be trained again.
    Trajectories in a group with equal scores, or without a trainable call, stay unused.

    Raises:
        WindowNotReadyError: in no group of the window do the scores differ.
        TrainingError: the update diverged.
        AlreadyTrainedError, FencedError: another worker trained the window; nothing was changed.
        SupersededError: another policy leads since the update began; nothing was changed.
    """
    claim = scored.claim
    if committed := await policy_of_window(store, claim.window_id):
        return trained_from(store, claim, committed)  # the answer to an earlier commit was lost
    async with guarded(store, claim):  # a run whose parent died must not keep a GPU from the next
        pass
    parent = await ensure_champion(store, settings.home, settings.model, settings.seed)
    rows = await asyncio.to_thread(training_rows, settings.home, scored.artifact)
    work = TrainInput(
        store=store,
        settings=settings,
        claim=claim,
        parent=parent,
        rows=rows,
        scored=scored.artifact.sha256,
        target=checkpoint_directory(settings.home, claim),
        progress_directory=await asyncio.to_thread(take_up_progress, settings.home, claim),
        staleness=await staleness_of(store, parent, rows),
        optimizer=await optimizer_of(store, parent),
        progress=progress,
    )
    made = await make_update(
        work, scored, settings.population, settings.evaluation, settings.judge, only=member
    )
    if made is None:
        return None
    batch_id = await next_batch(store, claim.window_id)
    version = await commit_policy(
        store,
        claim,
        parent_version=parent.policy_version,
        kind="lora" if (made.target / "adapter_config.json").exists() else "full",
        uri=str(made.target),
        base_model=parent.base_model,
        batch_id=batch_id,
        trajectory_ids=made.trajectory_ids,
        metrics=made.metrics,
        digest=await asyncio.to_thread(files.publish_checkpoint, settings.home, str(made.target)),
    )
    # not before: an update that is not committed is finished by the next claim
    await asyncio.to_thread(forget_progress, settings.home, work.progress_directory)
    return Trained(
        claim=claim,
        batch_id=batch_id,
        policy_version=version,
        parent_version=parent.policy_version,
        checkpoint_uri=settings.home.reference(made.target),
        metrics=made.metrics,
    )


def trained_from(store: Store, claim: Claim, policy: Policy) -> Trained:
    """Return the manifest of a committed policy, under the present claim."""
    assert policy.batch_id is not None and policy.parent_version is not None  # not the base model
    return Trained(
        claim=claim,
        batch_id=policy.batch_id,
        policy_version=policy.policy_version,
        parent_version=policy.parent_version,
        checkpoint_uri=store.home.reference(policy.uri),
        metrics=policy.metrics,
    )


def checkpoint_directory(home: Home, claim: Claim) -> Path:
    """Return the claim's own directory: a fenced worker must not write into its successor's."""
    return home.checkpoints / claim_name(claim)
