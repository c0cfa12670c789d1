"""Training jobs at a provider: who waits for which, and what came of it.

A job's row is written before the job is submitted and gets the provider's id before anybody polls,
so that a crash loses neither. Of one model at most one job is open (submitting or running), and
every write is fenced by the claim of the window that the job trains.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from babylon.errors import FencedError, TrainingError
from babylon.store.connection import Store, affected, guarded
from babylon.types import Claim

Status = Literal["submitting", "running", "done", "failed", "expired"]
OPEN = ("submitting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A row of ``babylon.training_jobs``; ``left_s`` to its deadline, by the database's clock."""

    batch_id: str
    attempt: int
    window_id: str
    epoch: int
    trainer: str
    model: str
    parent_version: int
    parent_step: int
    job_id: str | None
    status: Status
    reason: str | None
    step: int | None
    uri: str | None
    metrics: dict[str, Any]
    created_at: datetime
    deadline: datetime
    left_s: float


_COLUMNS = "*, extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s"


async def newest_job(store: Store, batch_id: str) -> TrainingJob | None:
    """The last attempt at a batch."""
    row = await store.pool.fetchrow(
        f"SELECT {_COLUMNS} FROM babylon.training_jobs WHERE batch_id = $1"
        " ORDER BY attempt DESC LIMIT 1",
        batch_id,
    )
    return None if row is None else TrainingJob(**row)


async def is_known_model(store: Store, model: str) -> bool:
    """Whether this database ever had a job of that model."""
    return bool(
        await store.pool.fetchval(
            "SELECT EXISTS (SELECT FROM babylon.training_jobs WHERE model = $1)", model
        )
    )


async def begin_job(
    store: Store,
    claim: Claim,
    *,
    batch_id: str,
    trainer: str,
    model: str,
    parent_version: int,
    parent_step: int,
    deadline_s: float,
) -> TrainingJob:
    """Write down that a job is about to be submitted; ``deadline_s`` from now it is given up.

    An open job of the model whose deadline is over, of whatever window, is closed as expired.

    Raises:
        FencedError: the claim is stale.
        TrainingError: another job of the model is open.
    """
    async with guarded(store, claim) as connection:
        await connection.execute("LOCK TABLE babylon.training_jobs IN SHARE ROW EXCLUSIVE MODE")
        await connection.execute(
            "UPDATE babylon.training_jobs SET status = 'expired', reason = 'nobody waited for it'"
            " WHERE model = $1 AND status = ANY($2) AND deadline <= clock_timestamp()",
            model,
            OPEN,
        )
        if other := await connection.fetchrow(
            "SELECT window_id, job_id, deadline FROM babylon.training_jobs"
            " WHERE model = $1 AND status = ANY($2)",
            model,
            OPEN,
        ):
            raise TrainingError(
                f"{trainer} still trains window {other['window_id']} (job"
                f" {other['job_id'] or 'not yet known'}) on model {model}: train that window to its"
                f" end, or wait until {other['deadline']:%Y-%m-%d %H:%M:%S} UTC"
            )
        row = await connection.fetchrow(
            "INSERT INTO babylon.training_jobs (batch_id, attempt, window_id, epoch, trainer,"
            " model, parent_version, parent_step, deadline)"
            " SELECT $1, coalesce(max(attempt), 0) + 1, $2, $3, $4, $5, $6, $7,"
            " clock_timestamp() + $8 FROM babylon.training_jobs WHERE batch_id = $1"
            f" RETURNING {_COLUMNS}",
            batch_id,
            claim.window_id,
            claim.epoch,
            trainer,
            model,
            parent_version,
            parent_step,
            timedelta(seconds=deadline_s),
        )
        assert row is not None
        return TrainingJob(**row)


async def take_job(store: Store, claim: Claim, job: TrainingJob) -> None:
    """The claim follows an open job that an earlier claim of the window began."""
    await _change(store, claim, job, "epoch = $5", claim.epoch)


async def job_submitted(store: Store, claim: Claim, job: TrainingJob, job_id: str) -> None:
    """Store the provider's id of a job, before anybody waits for it."""
    await _change(store, claim, job, "status = 'running', job_id = $5", job_id)


async def close_job(
    store: Store, claim: Claim, job: TrainingJob, status: Literal["failed", "expired"], reason: str
) -> None:
    """The job comes to nothing, and another one may be submitted."""
    await _change(store, claim, job, "status = $5, reason = $6", status, reason)


async def finish_job(
    store: Store,
    claim: Claim,
    job: TrainingJob,
    *,
    step: int,
    uri: str,
    metrics: dict[str, float],
) -> None:
    """The job made checkpoint ``step``, which now lies at ``uri``."""
    await _change(
        store,
        claim,
        job,
        "status = 'done', step = $5, uri = $6, metrics = $7",
        step,
        uri,
        metrics,
    )


async def _change(
    store: Store, claim: Claim, job: TrainingJob, change: str, *values: object
) -> None:
    async with guarded(store, claim) as connection:
        status = await connection.execute(
            f"UPDATE babylon.training_jobs SET {change} WHERE batch_id = $1 AND attempt = $2"
            " AND window_id = $3 AND status = ANY($4)",
            job.batch_id,
            job.attempt,
            claim.window_id,
            OPEN,
            *values,
        )
        if not affected(status):
            raise FencedError(
                f"window {claim.window_id}: {job.trainer} job {job.job_id or job.attempt} was"
                " closed by another worker; nothing was written"
            )
