"""A window's training job at W&B: submitted once, waited for by whoever claims the window.

The service trains the newest checkpoint of a model, and has no list of jobs and no cancellation.
Therefore one model is one line of checkpoints, trained by one job at a time:

- Checkpoints after the parent's (a challenger that was rejected, a policy that was rolled back)
  are deleted at W&B before a job starts; ours on disk stay.
- A job's row says ``submitting`` before the request goes out and has the job's id before the first
  look at its events. Whoever claims the window next waits for that job instead of submitting again.
- A worker that dies between the request and the id leaves the one doubt there is. Its successor
  waits for the checkpoint that the job, if it was ever received, must add; at the deadline
  (``GPU_TIMEOUT_SECONDS`` after the row was written) the attempt is given up, and the run after
  that submits anew.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import openai

from babylon.core.errors import ConfigError, TrainingError
from babylon.policies.adopt import adapter_base, adopt_adapter
from babylon.store import training_jobs as jobs
from babylon.store.training_jobs import TrainingJob
from babylon.training.backends.art_local import load_art
from babylon.training.backends.art_window import ArtWindow
from babylon.training.backends.updater import TrainInput

TRAINER = "serverless"
LAST_LOOK_S = 20.0  # a job whose deadline went by unwatched is looked at once more
POLL_S = 5.0


class Run:
    """A window's job, from whatever an earlier claim left of it to the checkpoint on disk.

    ``choose`` is asked for the rows to send when, and only when, a new job is submitted.
    """

    def __init__(
        self, work: TrainInput, backend: Any, model: Any, choose: Callable[[], Awaitable[ArtWindow]]
    ) -> None:
        self._work, self._choose = work, choose
        self._backend, self._model = backend, model
        self._store, self._claim = work.store, work.claim

    async def checkpoint(self) -> TrainingJob:
        """Get the job done and its checkpoint pulled."""
        job = await jobs.newest_job(self._store, self._claim.window_id)
        if job is not None and job.open:
            await jobs.take_job(self._store, self._claim, job)
            if done := await self._resume(job):
                return done
        elif job is not None and await self._is_there(job):
            await self._fetch(job.step or 0)
            return job
        return await self._begin()

    async def _is_there(self, job: TrainingJob) -> bool:
        """Whether an earlier claim's job is done, and only its checkpoint was not committed."""
        return (
            job.status == "done"
            and job.model == self._model.id
            and job.parent_version == self._work.parent.policy_version
            and not await jobs.is_superseded(self._store, job)
            and job.step in await self._backend.checkpoints(self._model)
        )

    async def _resume(self, job: TrainingJob) -> TrainingJob | None:
        """Wait for an earlier claim's job; None when it is of no use and closed."""
        if job.model != self._model.id:
            raise TrainingError(
                f"window {job.window_id} is being trained on model {job.model}, now MODEL_NAME and"
                f" WANDB_PROJECT mean {self._model.id}: set them back, or wait until"
                f" {job.deadline:%Y-%m-%d %H:%M:%S} UTC"
            )
        if job.status == "preparing":
            await self._close(job, "failed", "its worker died before it was submitted")
            return None
        if job.status == "submitting":
            metrics = await self._wait_for_checkpoint(job)
        else:
            metrics = await self._follow(job, [])
        if job.parent_version != self._work.parent.policy_version:
            await self._close(job, "failed", f"policy {job.parent_version} is no longer champion")
            return None
        return await self._pull(job, metrics)

    async def _begin(self) -> TrainingJob:
        window = await self._choose()
        known = await jobs.is_known_model(self._store, self._model.id)
        parents = await parents_job(self._work)
        if parents is not None and parents.model != self._model.id:
            raise ConfigError(
                f"policy {self._work.parent.policy_version} was trained on model {parents.model} of"
                f" W&B, MODEL_NAME and WANDB_PROJECT mean {self._model.id}: set them back, or set"
                " TRAINER=torch"
            )
        job = await jobs.begin_job(
            self._store,
            self._claim,
            trainer=TRAINER,
            model=self._model.id,
            parent_version=self._work.parent.policy_version,
            parent_step=0 if parents is None else parents.step or 0,
            trajectory_ids=window.trajectory_ids,
            counts=window.counts(),
            excluded=asdict(window.excluded),
            deadline_s=self._work.settings.prefect.gpu_timeout_s,
        )
        try:
            await self._roll_back(job, known)
        except (ConfigError, TrainingError, openai.APIError) as error:
            await self._close(job, "failed", str(error))
            raise
        art = await load_art()
        groups = await asyncio.to_thread(art.trajectory_groups, window.rows)
        await jobs.job_submitting(self._store, self._claim, job)
        return await self._pull(job, await self._follow(job, groups))

    async def _roll_back(self, job: TrainingJob, known: bool) -> None:
        """Make the parent's checkpoint the model's newest, which is the one that is trained."""
        steps = await self._backend.checkpoints(self._model)
        if job.parent_step and job.parent_step not in steps:
            raise TrainingError(
                f"W&B has no checkpoint {job.parent_step} of model {job.model}, on which policy"
                f" {job.parent_version} rests, but {sorted(steps)}: set TRAINER=torch"
            )
        if not any(step > job.parent_step for step in steps):
            return
        if not known:
            raise ConfigError(
                f"W&B's model {self._model.entity}/{self._model.project}/{self._model.name} has"
                f" checkpoints {sorted(steps)} that are not from here: set MODEL_NAME to a new name"
            )
        keep = [step for step in steps if step <= job.parent_step]
        await self._backend._delete_checkpoint_files(self._model, keep)

    async def _follow(self, job: TrainingJob, groups: Sequence[Any]) -> dict[str, float]:
        """Submit a job, unless it is running already, and wait for its end → its metrics."""
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
                    scale_rewards=False,  # as in our own trainer: near-ties must not blow up
                )
        except TimeoutError as error:
            raise await self._overdue(job) from error
        except openai.APIError as error:
            if not accepted and _was_refused(error):
                await self._close(job, "failed", reason_of(error))
            raise
        except RuntimeError as error:  # what ART makes of a training_failed event
            await self._close(job, "failed", str(error))
            raise TrainingError(f"W&B, window {job.window_id}: {error}") from error
        metrics: dict[str, float] = result.metrics
        return metrics

    async def _wait_for_checkpoint(self, job: TrainingJob) -> dict[str, float]:
        """Of a job whose id is unknown only the checkpoint will tell."""
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
        """The one checkpoint that the job added comes to ``work.target``."""
        steps = await self._backend.checkpoints(self._model)
        newer = sorted(step for step in steps if step > job.parent_step)
        if len(newer) != 1:
            reason = (
                f"one checkpoint after {job.parent_step} was to be expected, W&B has"
                f" {newer or 'none'}: nothing else may train this model"
            )
            await self._close(job, "failed", reason)
            raise TrainingError(f"W&B, window {job.window_id}: {reason}; run the window again")
        await self._fetch(newer[0])
        return await jobs.finish_job(self._store, self._claim, job, step=newer[0], metrics=metrics)

    async def _fetch(self, step: int) -> None:
        """Download a checkpoint and make it ours, at ``work.target``."""
        base = await asyncio.to_thread(adapter_base, self._work.parent.uri)
        target = self._work.target
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as pulled:
            await self._backend.pull(self._model, step, Path(pulled))
            await asyncio.to_thread(adopt_adapter, Path(pulled), base, target)

    async def _overdue(self, job: TrainingJob) -> TrainingError:
        await self._close(job, "expired", "overdue")
        return TrainingError(
            f"W&B, window {job.window_id}: the job begun at {job.created_at:%Y-%m-%d %H:%M:%S} UTC"
            " did not end in time"
            f" (GPU_TIMEOUT_SECONDS={self._work.settings.prefect.gpu_timeout_s:g}): run the window"
            " again to submit another, or raise the limit"
        )

    async def _close(
        self, job: TrainingJob, status: Literal["failed", "expired"], reason: str
    ) -> None:
        await jobs.close_job(self._store, self._claim, job, status, reason)


async def parents_job(work: TrainInput) -> TrainingJob | None:
    """The job that made the parent, None for the base model.

    Raises:
        ConfigError: the parent's weights are not at W&B.
    """
    parent = work.parent
    if parent.kind == "base":
        return None
    job = await jobs.newest_job(work.store, parent.window_id) if parent.window_id else None
    if job is None or job.status != "done" or job.trainer != TRAINER:
        raise ConfigError(
            f"policy {parent.policy_version} was not trained at W&B, so its weights are not there:"
            " go on with TRAINER=torch, or roll back to a policy that was"
            " (`babylon model rollback`)"
        )
    if await jobs.is_superseded(work.store, job):
        raise ConfigError(
            f"policy {parent.policy_version} was checkpoint {job.step} of its model at W&B, which"
            " went on from an earlier one since: go on with TRAINER=torch"
        )
    return job


def _was_refused(error: openai.APIError) -> bool:
    """Whether a submission certainly made no job: a refusal, or no connection at all."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code < 500 and error.status_code != 408
    return isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout))


def reason_of(error: openai.APIError) -> str:
    """What the provider said, or why it could not be reached."""
    return f"{error.message} ({error.__cause__})" if error.__cause__ else error.message
