"""The train stage: a scored window becomes a committed policy."""

import asyncio
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.core.trajectories import training_rows
from babylon.core.types import Claim, Scored, Trained
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store.connection import Store
from babylon.store.lineage import parents, staleness
from babylon.store.policies import (
    Policy,
    champion,
    checkpoint_uris,
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

    The commit also consumes the trajectories that moved the policy: none of them can be trained
    again. Those without a differing score or a trainable call stay unused, and their rows say so.

    Raises:
        WindowNotReadyError: no group of the window has differing scores.
        TrainingError: the update diverged.
        AlreadyTrainedError, FencedError: somebody else trained the window; nothing was changed.
    """
    claim = scored.claim
    if committed := await policy_of_batch(store, batch_of(claim.window_id)):
        return trained_from(claim, committed)  # the answer to an earlier commit got lost
    work = await _work(store, settings, scored, progress)
    trainer = await asyncio.to_thread(
        updater, settings.training.trainer
    )  # its import takes seconds
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
        target=checkpoint_directory(settings, scored.claim),
        progress_directory=await asyncio.to_thread(take_up_progress, settings.home, scored.claim),
        # of the window's own policies only: the update is the same whatever else was trained since
        staleness={version: age for version, age in ages.items() if version in played},
        behaviours=await checkpoint_uris(store, unlogged, removed=False),
        progress=progress,
    )


def trained_from(claim: Claim, policy: Policy) -> Trained:
    """The manifest of a policy that was committed before, under the present claim."""
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
    """A window is one batch."""
    return f"window-{window_id}"


def checkpoint_directory(settings: Settings, claim: Claim) -> Path:
    """One directory a claim: a fenced worker cannot overwrite what its successor writes."""
    return settings.home.checkpoints / claim_name(claim)


async def ensure_champion(
    store: Store, settings: Settings, *, progress: Progress | None = None
) -> Policy:
    """The serving policy; with none yet, the base model is made or found and becomes version 0.

    Raises:
        ConfigError: ``BASE_MODEL`` names another model than this home was started with.
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
