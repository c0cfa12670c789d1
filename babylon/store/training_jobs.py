"""The table ``training_jobs``: jobs that a provider trains for us, one row for each attempt.

A job's row is written before the job is submitted, and the provider's id before anybody polls, so
that a crash loses neither. At most one job of a model is open. Every write is guarded by the claim
of the window that the job trains. A ``preparing`` job was not submitted, a ``submitting`` one may
have reached the provider, and a ``running`` one has the provider's id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from babylon.core.errors import FencedError, TrainingError
from babylon.core.types import Claim
from babylon.store.connection import Connection, Store, guarded

Status = Literal["preparing", "submitting", "running", "done", "failed", "expired"]
OPEN = ("preparing", "submitting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A row of ``babylon.training_jobs``.

    ``left_s``: seconds to the deadline, by the database's clock. ``trajectory_ids``, ``counts`` and
    ``excluded`` describe the batch that was sent; a later claim of the window may send another.
    ``scored``: digest of the scored window; None: a worker before 0022 began the job.
    """

    window_id: str
    attempt: int
    epoch: int
    trainer: str
    model: str
    parent_version: int
    parent_step: int
    trajectory_ids: list[str]
    counts: dict[str, int]
    excluded: dict[str, int]
    scored: str | None
    job_id: str | None
    status: Status
    reason: str | None
    step: int | None
    metrics: dict[str, float]
    created_at: datetime
    submitted_at: datetime | None
    deadline: datetime
    left_s: float

    @property
    def open(self) -> bool:
        """True until the job is done, failed or expired."""
        return self.status in OPEN


_COLUMNS = "*, extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s"


async def newest_job(store: Store, window_id: str) -> TrainingJob | None:
    """Return the last attempt at a window."""
    row = await store.pool.fetchrow(
        f"SELECT {_COLUMNS} FROM babylon.training_jobs WHERE window_id = $1"
        " ORDER BY attempt DESC LIMIT 1",
        window_id,
    )
    return None if row is None else TrainingJob(**row)


async def is_known_model(store: Store, model: str) -> bool:
    """Return True if this database ever submitted a job for that model."""
    return bool(
        await store.pool.fetchval(
            "SELECT EXISTS (SELECT FROM babylon.training_jobs WHERE model = $1"
            " AND submitted_at IS NOT NULL)",
            model,
        )
    )


async def is_superseded(store: Store, job: TrainingJob) -> bool:
    """Return True if a later job started from an older checkpoint, which removed this job's."""
    return bool(
        await store.pool.fetchval(
            "SELECT EXISTS (SELECT FROM babylon.training_jobs WHERE model = $1"
            " AND submitted_at > $2 AND parent_step < $3)",
            job.model,
            job.submitted_at,
            job.step,
        )
    )


async def begin_job(
    store: Store,
    claim: Claim,
    *,
    trainer: str,
    model: str,
    parent_version: int,
    parent_step: int,
    trajectory_ids: Sequence[str],
    counts: dict[str, int],
    excluded: dict[str, int],
    scored: str,
    deadline_s: float,
) -> TrainingJob:
    """Insert a job that is about to be submitted; it expires after ``deadline_s``.

    An open job of the same model whose deadline has passed is closed first, as expired.

    Raises:
        FencedError: the claim is stale.
        TrainingError: another job of the model is open.
    """
    async with guarded(store, claim) as connection:
        # Otherwise two runs could both find that the model has no open job. Readers go on.
        await connection.execute("LOCK TABLE babylon.training_jobs IN SHARE ROW EXCLUSIVE MODE")
        await _require_no_open_job(connection, trainer, model)
        row = await connection.fetchrow(
            "INSERT INTO babylon.training_jobs (window_id, attempt, epoch, trainer, model,"
            " parent_version, parent_step, trajectory_ids, counts, excluded, scored, deadline)"
            " SELECT $1, coalesce(max(attempt), 0) + 1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
            " clock_timestamp() + $11 FROM babylon.training_jobs WHERE window_id = $1"
            f" RETURNING {_COLUMNS}",
            claim.window_id,
            claim.epoch,
            trainer,
            model,
            parent_version,
            parent_step,
            list(trajectory_ids),
            counts,
            excluded,
            scored,
            timedelta(seconds=deadline_s),
        )
        assert row is not None
        return TrainingJob(**row)


async def _require_no_open_job(connection: Connection, trainer: str, model: str) -> None:
    """Close the model's expired job, then check that none is open."""
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


async def take_job(store: Store, claim: Claim, job: TrainingJob) -> None:
    """Move an open job, which an earlier claim of the window began, to the present claim."""
    await _change(store, claim, job, "epoch = $4", claim.epoch)


async def job_submitting(store: Store, claim: Claim, job: TrainingJob) -> None:
    """Mark a job just before the request to the provider."""
    await _change(store, claim, job, "status = 'submitting', submitted_at = clock_timestamp()")


async def job_submitted(store: Store, claim: Claim, job: TrainingJob, job_id: str) -> None:
    """Store the provider's id of a job."""
    await _change(store, claim, job, "status = 'running', job_id = $4", job_id)


async def close_job(
    store: Store, claim: Claim, job: TrainingJob, status: Literal["failed", "expired"], reason: str
) -> None:
    """Close a job without a checkpoint. Another job may then be submitted."""
    await _change(store, claim, job, "status = $4, reason = $5", status, reason)


async def finish_job(
    store: Store, claim: Claim, job: TrainingJob, *, step: int, metrics: dict[str, float]
) -> TrainingJob:
    """Close a job that made the checkpoint ``step``."""
    change = "status = 'done', step = $4, metrics = $5"
    return await _change(store, claim, job, change, step, metrics)


async def _change(
    store: Store, claim: Claim, job: TrainingJob, change: str, *values: object
) -> TrainingJob:
    async with guarded(store, claim) as connection:
        row = await connection.fetchrow(
            f"UPDATE babylon.training_jobs SET {change} WHERE window_id = $1 AND attempt = $2"
            f" AND status = ANY($3) RETURNING {_COLUMNS}",
            claim.window_id,
            job.attempt,
            OPEN,
            *values,
        )
        if row is None:
            raise FencedError(
                f"window {claim.window_id}: {job.trainer} job {job.job_id or job.attempt} was"
                " closed by another worker; nothing was written"
            )
        return TrainingJob(**row)
