"""Stage ``train``: one update of the champion, committed as the next policy version."""

import asyncio
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.trajectories import training_rows
from babylon.core.types import Claim, Scored, Trained
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store.connection import Store
from babylon.store.lineage import parents, staleness
from babylon.store.policies import (
    Policy,
    champion,
    checkpoints_at_hand,
    commit_policy,
    ensure_base,
    list_policies,
    policy_of_batch,
)
from babylon.training.backends.registry import updater
from babylon.training.backends.train_input import Progress, TrainInput
from babylon.training.progress_directory import claim_name, take_up_progress
from babylon.training.update_result import update_metrics


async def train_window(
    store: Store, settings: Settings, scored: Scored, *, progress: Progress | None = None
) -> Trained:
    """Train the champion on a window, save the checkpoint, commit it as the next policy version.

    The commit also consumes the trajectories that moved the policy: they cannot be trained again.
    Trajectories in a group with equal scores, or without a trainable call, stay unused.

    Raises:
        WindowNotReadyError: in no group of the window do the scores differ.
        TrainingError: the update diverged.
        AlreadyTrainedError, FencedError: another worker trained the window; nothing was changed.
    """
    claim = scored.claim
    if committed := await policy_of_batch(store, batch_of(claim.window_id)):
        return trained_from(claim, committed)  # the answer to an earlier commit was lost
    work = await _work(store, settings, scored, progress)
    # in a thread, because importing a trainer takes seconds
    trainer = await asyncio.to_thread(updater, settings.training.trainer)
    update = await trainer(work)
    metrics = update_metrics(update, scored)
    batch_id = batch_of(claim.window_id)
    version = await commit_policy(
        store,
        claim,
        parent_version=work.parent.policy_version,
        kind="lora" if (work.target / "adapter_config.json").exists() else "full",
        uri=str(work.target),
        base_model=work.parent.base_model,
        batch_id=batch_id,
        trajectory_ids=update.trajectory_ids,
        metrics=metrics,
        digest=await asyncio.to_thread(checkpoint_digest, str(work.target)),
    )
    return Trained(
        claim=claim,
        batch_id=batch_id,
        policy_version=version,
        parent_version=work.parent.policy_version,
        checkpoint_uri=str(work.target),
        metrics=metrics,
    )


async def _work(
    store: Store, settings: Settings, scored: Scored, progress: Progress | None
) -> TrainInput:
    parent = await ensure_champion(store, settings)
    rows = await asyncio.to_thread(training_rows, scored.artifact)
    calls = [call for row in rows for call in row.calls]
    played = {call.policy_version for call in calls}
    unlogged = {call.policy_version for call in calls if call.logprobs is None}
    ages = staleness(await parents(store), parent.policy_version)
    return TrainInput(
        store=store,
        settings=settings,
        claim=scored.claim,
        parent=parent,
        rows=rows,
        target=checkpoint_directory(settings.home, scored.claim),
        progress_directory=await asyncio.to_thread(take_up_progress, settings.home, scored.claim),
        # only of policies that played: the update does not depend on what was trained since
        staleness={version: age for version, age in ages.items() if version in played},
        behaviours=await checkpoints_at_hand(store, unlogged),
        progress=progress,
    )


def trained_from(claim: Claim, policy: Policy) -> Trained:
    """Return the manifest of a committed policy, under the present claim."""
    assert policy.batch_id is not None and policy.parent_version is not None  # not the base model
    return Trained(
        claim=claim,
        batch_id=policy.batch_id,
        policy_version=policy.policy_version,
        parent_version=policy.parent_version,
        checkpoint_uri=policy.uri,
        metrics=policy.metrics,
    )


def batch_of(window_id: str) -> str:
    """Return the batch id of a window: a window is one batch."""
    return f"window-{window_id}"


def checkpoint_directory(home: Home, claim: Claim) -> Path:
    """Return the claim's own directory: a fenced worker must not write into its successor's."""
    return home.checkpoints / claim_name(claim)


async def ensure_champion(
    store: Store, settings: Settings, *, progress: Progress | None = None
) -> Policy:
    """Return the serving policy. Without any policy, register the base model as version 0.

    Raises:
        ConfigError: ``BASE_MODEL`` names another model than the one this home started with.
    """
    if not await list_policies(store):
        from babylon.training.base_model import resolve_base

        name, models = settings.model.base, settings.home.models
        base = str(await asyncio.to_thread(resolve_base, name, models, settings.seed, progress))
        await ensure_base(
            store,
            uri=base,
            base_model=settings.model.base or Path(base).name,
            digest=await asyncio.to_thread(checkpoint_digest, base),
        )
    policy, _ = await champion(store)
    if settings.model.base and policy.base_model != settings.model.base:
        raise ConfigError(
            f"BASE_MODEL is {settings.model.base!r}, but the policies here descend from"
            f" {policy.base_model!r}: use another BABYLON_HOME, or unset BASE_MODEL"
        )
    return policy
