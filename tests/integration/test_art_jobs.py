"""Training jobs in the database, without ART: fences, deadlines, one open job a model."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from babylon.core.errors import FencedError, TrainingError
from babylon.core.types import Claim
from babylon.core.windows import Window
from babylon.store import Store
from babylon.store.training_jobs import (
    TrainingJob,
    begin_job,
    close_job,
    finish_job,
    is_known_model,
    is_superseded,
    job_submitted,
    job_submitting,
    newest_job,
    take_job,
)
from babylon.store.windows import claim_window

WINDOW = Window(datetime(2025, 11, 14, 9, tzinfo=UTC))


async def claimed(store: Store, window: Window = WINDOW) -> Claim:
    return await claim_window(store, window, owner="worker", lease_s=60)


async def begun(store: Store, claim: Claim, **changes: Any) -> TrainingJob:
    return await begin_job(
        store,
        claim,
        **{
            "trainer": "serverless",
            "model": "m",
            "parent_version": 0,
            "parent_step": 0,
            "trajectory_ids": ("a", "b"),
            "counts": {"calls": 2},
            "excluded": {"greedy": 1},
            "scored": "digest",
            "deadline_s": 60.0,
            **changes,
        },
    )


async def trained(store: Store, claim: Claim, *, parent_step: int, step: int) -> TrainingJob:
    job = await begun(store, claim, parent_step=parent_step)
    await job_submitting(store, claim, job)
    return await finish_job(store, claim, job, step=step, metrics={})


async def test_a_job_goes_from_its_row_to_its_checkpoint(store: Store) -> None:
    claim = await claimed(store)
    job = await begun(store, claim)
    assert (job.status, job.attempt, job.job_id, job.trajectory_ids) == (
        "preparing", 1, None, ["a", "b"],
    )  # fmt: skip
    assert 0 < job.left_s <= 60 and job.open
    assert not await is_known_model(store, "m")  # nothing was submitted
    await job_submitting(store, claim, job)
    assert await is_known_model(store, "m")
    await job_submitted(store, claim, job, "j1")
    running = await newest_job(store, WINDOW.id)
    assert running is not None and (running.status, running.job_id) == ("running", "j1")
    done = await finish_job(store, claim, job, step=1, metrics={"loss/train": 0.5})
    assert (done.status, done.step, done.metrics) == ("done", 1, {"loss/train": 0.5})
    assert not done.open


async def test_a_claim_that_was_taken_over_writes_nothing(store: Store) -> None:
    stale = await claimed(store)
    job = await begun(store, stale)
    fresh = await claimed(store)
    for write in (
        lambda: begun(store, stale),
        lambda: job_submitting(store, stale, job),
        lambda: job_submitted(store, stale, job, "j1"),
        lambda: close_job(store, stale, job, "failed", "x"),
    ):
        with pytest.raises(FencedError, match="epoch 2 took it over"):
            await write()
    await take_job(store, fresh, job)
    taken = await newest_job(store, WINDOW.id)
    assert taken is not None and (taken.epoch, taken.status) == (2, "preparing")


async def test_two_windows_share_a_model_one_after_the_other(store: Store) -> None:
    first, second = await claimed(store), await claimed(store, WINDOW.next())
    job = await begun(store, first)
    with pytest.raises(TrainingError, match=r"still trains window 2025-11-14T09:00 \(job not yet"):
        await begun(store, second)
    await begun(store, second, model="another")
    await close_job(store, first, job, "failed", "no credit")
    assert (await begun(store, first)).attempt == 2


async def test_a_job_past_its_deadline_makes_way_and_cannot_be_finished(store: Store) -> None:
    first, second = await claimed(store), await claimed(store, WINDOW.next())
    job = await begun(store, first, deadline_s=0.01)
    await asyncio.sleep(0.02)
    await begun(store, second)
    expired = await newest_job(store, WINDOW.id)
    assert expired is not None and (expired.status, expired.left_s < 0) == ("expired", True)
    with pytest.raises(FencedError, match="was closed by another worker"):
        await finish_job(store, first, job, step=1, metrics={})


async def test_a_checkpoint_is_superseded_by_a_later_job_from_before_it(store: Store) -> None:
    first, second, third = [
        await claimed(store, window) for window in (WINDOW, WINDOW.next(), WINDOW.next().next())
    ]
    one = await trained(store, first, parent_step=0, step=1)
    two = await trained(store, second, parent_step=1, step=2)
    assert not await is_superseded(store, one) and not await is_superseded(store, two)
    other = await begun(store, third, parent_step=1)  # the second was rejected
    assert not await is_superseded(store, two)
    await job_submitting(store, third, other)
    assert not await is_superseded(store, one)
    assert await is_superseded(store, two)
