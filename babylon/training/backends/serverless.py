"""``TRAINER=serverless``: a window trained by W&B, through ART's client of its training API."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import openai

from babylon.core.discretion import told
from babylon.core.errors import ConfigError, TrainingError, reason_of
from babylon.core.llm_calls import content_text
from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.tokenizer import decoder
from babylon.store import training_jobs as jobs
from babylon.store.training_jobs import TrainingJob
from babylon.training.backends.art_local import adopt_adapter, load_art
from babylon.training.backends.art_window import ArtWindow, art_limits, art_window, known_secrets
from babylon.training.backends.train_input import TrainInput
from babylon.training.backends.trainer_requirements import (
    SERVERLESS_MODELS,
    WandbAccount,
    require_serverless,
)
from babylon.training.update_result import Excluded, Update, from_art

TRAINER = "serverless"
LAST_LOOK_S = 20.0  # wait for a job of an earlier claim, even past its deadline
POLL_S = 5.0


class ServerlessRun:
    """Runs a window's job to its checkpoint on disk, and resumes the job of an earlier claim.

    ``choose`` returns the rows to send. It is called only if a new job is submitted.
    """

    def __init__(
        self, work: TrainInput, backend: Any, model: Any, choose: Callable[[], Awaitable[ArtWindow]]
    ) -> None:
        self._work, self._choose = work, choose
        self._backend, self._model = backend, model
        self._store, self._claim = work.store, work.claim

    async def checkpoint(self) -> TrainingJob:
        """Complete the job, download its checkpoint to ``work.target`` and return the job."""
        job = await jobs.newest_job(self._store, self._claim.window_id)
        if job is not None and job.open:
            await jobs.take_job(self._store, self._claim, job)
            if done := await self._resume(job):
                return done
        elif job is not None and await self._has_checkpoint(job):
            await self._fetch(job.step or 0)
            return job
        return await self._begin()

    async def _has_checkpoint(self, job: TrainingJob) -> bool:
        """True if an earlier claim's job is done and its checkpoint can still be used."""
        return (
            job.status == "done"
            and job.model == self._model.id
            and job.parent_version == self._work.parent.policy_version
            and job.scored == self._work.scored  # a window that failed may be scored again
            and not await jobs.is_superseded(self._store, job)
            and job.step in await self._backend.checkpoints(self._model)
        )

    async def _resume(self, job: TrainingJob) -> TrainingJob | None:
        """Wait for an earlier claim's job. Return None if the job was closed without a result."""
        if job.model != self._model.id:
            raise TrainingError(
                f"window {job.window_id} is being trained on model {job.model}, but MODEL_NAME and"
                f" WANDB_PROJECT now mean {self._model.id}: set them back, or wait until"
                f" {job.deadline:%Y-%m-%d %H:%M:%S} UTC"
            )
        if job.status == "preparing":
            await self._close(job, "failed", "its worker died before it submitted the job")
            return None
        if job.status == "submitting":
            metrics = await self._wait_for_checkpoint(job)
        else:
            metrics = await self._follow(job, [])
        if job.parent_version != self._work.parent.policy_version:
            await self._close(
                job, "failed", f"policy {job.parent_version} is no longer the champion"
            )
            return None
        if job.scored != self._work.scored:
            await self._close(job, "failed", "the window was scored again")
            return None
        return await self._pull(job, metrics)

    async def _begin(self) -> TrainingJob:
        window = await self._choose()
        known = await jobs.is_known_model(self._store, self._model.id)
        parents = await parents_job(self._work)
        if parents is not None and parents.model != self._model.id:
            raise ConfigError(
                f"policy {self._work.parent.policy_version} was trained on W&B's model"
                f" {parents.model}, but MODEL_NAME and WANDB_PROJECT mean {self._model.id}: set"
                " them back, or set TRAINER=torch"
            )
        # On record before W&B is changed: after a crash, the next claim finds the job.
        job = await jobs.begin_job(
            self._store,
            self._claim,
            trainer=TRAINER,
            model=self._model.id,
            parent_version=self._work.parent.policy_version,
            parent_step=0 if parents is None else parents.step or 0,
            trajectory_ids=window.trajectory_ids,
            counts=window.counts,
            excluded=asdict(window.excluded),
            scored=self._work.scored,
            deadline_s=self._work.settings.prefect.stage_timeout_s,
        )
        try:
            await self._roll_back(job, known)
        except (ConfigError, TrainingError, openai.APIError) as error:
            await self._close(job, "failed", reason_of(error))
            raise
        art = await load_art()
        groups = await asyncio.to_thread(art.trajectory_groups, window.rows)
        await jobs.job_submitting(self._store, self._claim, job)
        return await self._pull(job, await self._follow(job, groups))

    async def _roll_back(self, job: TrainingJob, known: bool) -> None:
        """Delete newer checkpoints than the parent's: W&B always trains the newest one."""
        steps = await self._backend.checkpoints(self._model)
        if job.parent_step and job.parent_step not in steps:
            raise TrainingError(
                f"W&B has checkpoints {sorted(steps)} of model {job.model}, but not checkpoint"
                f" {job.parent_step}, which is policy {job.parent_version}: set TRAINER=torch"
            )
        if not any(step > job.parent_step for step in steps):
            return
        if not known:
            raise ConfigError(
                f"W&B's model {self._model.entity}/{self._model.project}/{self._model.name} has"
                f" checkpoints {sorted(steps)} that this home did not train: set MODEL_NAME to a"
                " new name"
            )
        keep = [step for step in steps if step <= job.parent_step]
        await self._backend._delete_checkpoint_files(self._model, keep)

    async def _follow(self, job: TrainingJob, groups: Sequence[Any]) -> dict[str, float]:
        accepted = resumed = job.job_id is not None

        async def submitted(job_id: str) -> None:
            nonlocal accepted
            accepted = True
            await jobs.job_submitted(self._store, self._claim, job, job_id)

        try:
            async with asyncio.timeout(max(job.left_s, LAST_LOOK_S) if resumed else job.left_s):
                result = await self._backend.train_job(
                    self._model,
                    groups,
                    job_id=job.job_id,
                    submitted=submitted,
                    learning_rate=self._work.settings.training.effective_learning_rate,
                    scale_rewards=False,  # as in our own trainer: scaling would amplify near-ties
                )
        except TimeoutError as error:
            raise await self._overdue(job) from error
        except openai.APIError as error:
            if not accepted and _was_refused(error):
                await self._close(job, "failed", provider_message(error, self._work))
            raise
        except RuntimeError as error:  # ART raises it for a training_failed event
            reason = provider_message(error, self._work)
            await self._close(job, "failed", reason)
            raise TrainingError(f"W&B, window {job.window_id}: {reason}") from None
        metrics: dict[str, float] = result.metrics
        return metrics

    async def _wait_for_checkpoint(self, job: TrainingJob) -> dict[str, float]:
        try:
            async with asyncio.timeout(max(job.left_s, LAST_LOOK_S)):
                while True:
                    steps = await self._backend.checkpoints(self._model)
                    if newer := [step for step in steps if step > job.parent_step]:
                        metrics: dict[str, float] = steps[min(newer)]
                        return metrics
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise await self._overdue(job) from error

    async def _pull(self, job: TrainingJob, metrics: dict[str, float]) -> TrainingJob:
        steps = await self._backend.checkpoints(self._model)
        newer = sorted(step for step in steps if step > job.parent_step)
        if len(newer) != 1:
            reason = (
                f"expected one checkpoint after {job.parent_step}, but W&B has {newer or 'none'}:"
                " nothing else may train this model"
            )
            await self._close(job, "failed", reason)
            raise TrainingError(f"W&B, window {job.window_id}: {reason}; run the window again")
        await self._fetch(newer[0])
        return await jobs.finish_job(self._store, self._claim, job, step=newer[0], metrics=metrics)

    async def _fetch(self, step: int) -> None:
        parent = self._work.parent.uri
        base = await asyncio.to_thread(adapter_base, parent) or parent
        target = self._work.target
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as pulled:
            await self._backend.pull(self._model, step, Path(pulled))
            await asyncio.to_thread(adopt_adapter, Path(pulled), base, target)

    async def _overdue(self, job: TrainingJob) -> TrainingError:
        await self._close(job, "expired", "overdue")
        return TrainingError(
            f"W&B, window {job.window_id}: the job of {job.created_at:%Y-%m-%d %H:%M:%S} UTC"
            " did not end in time"
            f" (STAGE_TIMEOUT_SECONDS={self._work.settings.prefect.stage_timeout_s:g}): run the"
            " window again to submit another, or raise the limit"
        )

    async def _close(
        self, job: TrainingJob, status: Literal["failed", "expired"], reason: str
    ) -> None:
        await jobs.close_job(self._store, self._claim, job, status, reason)


async def parents_job(work: TrainInput) -> TrainingJob | None:
    """The job that trained the parent, None for the base model.

    Raises:
        ConfigError: W&B does not have the parent's weights.
    """
    parent = work.parent
    if parent.kind == "base":
        return None
    job = await jobs.newest_job(work.store, parent.window_id) if parent.window_id else None
    if job is None or job.status != "done" or job.trainer != TRAINER:
        raise ConfigError(
            f"policy {parent.policy_version} was not trained at W&B, so its weights are not there:"
            " set TRAINER=torch, or roll back to a policy that was trained there"
            " (`babylon deploy rollback`)"
        )
    if await jobs.is_superseded(work.store, job):
        raise ConfigError(
            f"policy {parent.policy_version} was checkpoint {job.step} of its model at W&B, which"
            " was trained from an earlier checkpoint since: set TRAINER=torch"
        )
    return job


def _was_refused(error: openai.APIError) -> bool:
    """True if the submission certainly created no job: it was refused, or never connected."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code < 500 and error.status_code != 408
    return isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout))


def provider_message(error: Exception, work: TrainInput) -> str:
    """Return the provider's message, without the words of the play that was sent to it."""
    said = error.message if isinstance(error, openai.APIError) else str(error)
    if isinstance(error, openai.APIError) and error.__cause__:
        said = f"{said} ({error.__cause__})"
    calls = [call for row in work.rows for call in row.calls]
    texts = [content_text(message) for call in calls for message in call.messages]
    return told(said, [*texts, *(call.response for call in calls)])


async def update_serverless(work: TrainInput) -> Update:
    """Train one window at W&B, and write the adapter to ``work.target``.

    Raises:
        ConfigError: the service does not support this policy or these settings, rejects the API
            key, or holds checkpoints of the model that this home did not train.
        WindowNotReadyError: nothing in the window can be trained; no job was submitted.
        TrainingError: the job failed or is overdue, or the service cannot be reached.
    """
    account = require_serverless(work.settings.training, work.parent.base_model)
    await parents_job(work)

    async def choose() -> ArtWindow:
        limits = art_limits(
            work,
            context=SERVERLESS_MODELS[work.parent.base_model],
            secrets=known_secrets(work.settings.database) | {account.api_key.get_secret_value()},
            decode=await asyncio.to_thread(decoder, work.parent.uri),
        )
        return await asyncio.to_thread(art_window, work.rows, limits)

    async with _provider(work, account) as (backend, model):
        job = await ServerlessRun(work, backend, model, choose).checkpoint()
    return Update(
        report=from_art(job.metrics, job.counts),
        excluded=Excluded(**job.excluded),
        trajectory_ids=tuple(job.trajectory_ids),
    )


@asynccontextmanager
async def _provider(work: TrainInput, account: WandbAccount) -> AsyncIterator[tuple[Any, Any]]:
    art = await load_art()
    backend = art.Serverless(
        api_key=account.api_key.get_secret_value(),
        base_url=account.training_url,
        progress=work.progress,
    )
    model = art.Model(
        name=work.settings.model.name,
        project=work.settings.tracking.project or work.settings.model.name,
        entity=account.entity,
        base_model=work.parent.base_model,
    )
    try:
        await model.register(backend)
        yield backend, model
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise ConfigError(f"W&B rejects WANDB_API_KEY ({provider_message(error, work)})") from None
    except openai.APIError as error:
        raise TrainingError(
            f"W&B's training API, window {work.claim.window_id}: {provider_message(error, work)};"
            " the window's next run continues from here"
        ) from None
    finally:
        await backend.close()
