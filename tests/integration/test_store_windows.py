"""Claims, leases, fencing and states of windows, on a real Postgres."""

import asyncio
from datetime import UTC, datetime

import pytest

from babylon.core.errors import AlreadyTrainedError, FencedError, WindowError
from babylon.core.types import Rejection
from babylon.core.windows import Window, WindowState
from babylon.store import Store
from babylon.store.rejections import replace_rejections
from babylon.store.scores import StoredScore, replace_scores
from babylon.store.windows import claim_window, get_window, hold_lease, list_windows, set_state
from tests.leases import until_renewed

WINDOW = Window(datetime(2025, 11, 14, 9, tzinfo=UTC))


async def test_of_many_claimers_exactly_one_gets_the_window(store: Store) -> None:
    results = await asyncio.gather(
        *(claim_window(store, WINDOW, owner=f"worker-{i}", lease_s=60) for i in range(8)),
        return_exceptions=True,
    )
    refused = [result for result in results if isinstance(result, WindowError)]
    assert len(refused) == 7
    assert "is leased by worker-" in str(refused[0])
    row = await get_window(store, WINDOW.id)
    assert row is not None
    assert (row.state, row.epoch, row.minutes) == (WindowState.CLAIMED, 1, 60)


async def test_an_expired_lease_is_taken_over_and_its_holder_fenced(store: Store) -> None:
    stale = await claim_window(store, WINDOW, owner="slow", lease_s=0.05)
    await asyncio.sleep(0.1)
    fresh = await claim_window(store, WINDOW, owner="quick", lease_s=60)
    assert fresh.epoch == stale.epoch + 1
    with pytest.raises(FencedError, match="slow holds epoch 1, but epoch 2"):
        await set_state(store, stale, WindowState.SKIPPED)
    with pytest.raises(FencedError):
        await replace_scores(store, stale, [StoredScore(trajectory_id="t", scorer="s", score=1.0)])
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.scores") == 0
    await set_state(store, fresh, WindowState.SKIPPED, reason="2 agents", metrics={"agents": 2})
    (row,) = await list_windows(store)
    assert (row.state, row.reason, row.metrics) == (WindowState.SKIPPED, "2 agents", {"agents": 2})
    assert row.lease_until is None


async def test_an_owner_may_claim_again_what_it_holds(store: Store) -> None:
    first = await claim_window(store, WINDOW, owner="run-1", lease_s=60)
    second = await claim_window(store, WINDOW, owner="run-1", lease_s=60)
    assert second.epoch == first.epoch + 1


async def test_hold_lease_renews_beyond_the_lease(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=3)
    async with hold_lease(store, claim, 3):
        for _ in range(3):  # one in each third of the lease
            await until_renewed(store)
        with pytest.raises(WindowError, match="leased by worker"):
            await claim_window(store, WINDOW, owner="thief", lease_s=60)


async def test_a_lost_lease_cancels_the_body_at_once(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=1.5)
    with pytest.raises(FencedError, match="taken over"):
        async with asyncio.timeout(60), hold_lease(store, claim, 1.5):
            await store.pool.execute("UPDATE babylon.windows SET epoch = epoch + 1")
            await asyncio.sleep(3600)
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0


async def test_a_lease_survives_an_outage_that_is_shorter_than_itself(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=6)
    async with hold_lease(store, claim, 6):
        await store.pool.execute("ALTER TABLE babylon.windows RENAME TO away")
        await asyncio.sleep(2.2)  # the renewal after 2 s fails
        await store.pool.execute("ALTER TABLE babylon.away RENAME TO windows")
        await until_renewed(store)
        await set_state(store, claim, WindowState.SKIPPED)


async def test_a_lease_that_cannot_be_renewed_in_time_counts_as_lost(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=0.2)
    with pytest.raises(FencedError, match="could not renew its lease"):
        async with hold_lease(store, claim, 0.2):
            await store.pool.execute("ALTER TABLE babylon.windows RENAME TO away")
            await asyncio.sleep(30)


async def test_hold_lease_lets_errors_and_cancellation_of_the_body_through(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    with pytest.raises(ZeroDivisionError):
        async with hold_lease(store, claim, 60):
            raise ZeroDivisionError

    async def hold() -> None:
        async with hold_lease(store, claim, 60):
            await asyncio.sleep(30)

    task = asyncio.create_task(hold())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_window_that_is_done_is_not_claimed_again(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    await set_state(store, claim, WindowState.TRAINED)
    await set_state(store, claim, WindowState.REJECTED)
    with pytest.raises(AlreadyTrainedError, match="is rejected: it was trained before"):
        await claim_window(store, WINDOW, owner="worker", lease_s=60)


async def test_a_trained_window_is_resumed_as_trained_and_with_its_own_length(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="crashed", lease_s=0.01)
    await set_state(store, claim, WindowState.TRAINED)
    await asyncio.sleep(0.05)
    with pytest.raises(WindowError, match="60 minutes, not 15"):
        await claim_window(store, Window(WINDOW.start, 15), owner="next", lease_s=60)
    await claim_window(store, WINDOW, owner="next", lease_s=60)
    row = await get_window(store, WINDOW.id)
    assert row is not None and row.state == WindowState.TRAINED


@pytest.mark.parametrize("state", [WindowState.SKIPPED, WindowState.FAILED])
async def test_skipped_and_failed_windows_may_be_retried(store: Store, state: WindowState) -> None:
    claim = await claim_window(store, WINDOW, owner="one", lease_s=60)
    await set_state(store, claim, state)
    await claim_window(store, WINDOW, owner="two", lease_s=60)


async def test_a_state_that_may_not_follow_is_refused(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    with pytest.raises(WindowError, match="is claimed: it cannot become deployed"):
        await set_state(store, claim, WindowState.DEPLOYED)


async def test_rejections_of_an_earlier_attempt_are_replaced(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    rows = [
        Rejection(trajectory_id=f"t{i}", reason=reason, detail="steps[0]")
        for i, reason in enumerate(["no_llm_call", "no_llm_call", "malformed_json"])
    ]
    await replace_rejections(store, claim, rows)
    await replace_rejections(store, claim, rows)
    stored = await store.pool.fetch("SELECT trajectory_id, reason FROM babylon.rejections")
    assert {tuple(row) for row in stored} == {(row.trajectory_id, row.reason) for row in rows}
    assert len(stored) == len(rows)


async def test_unknown_window_is_none(store: Store) -> None:
    assert await get_window(store, "2025-01-01T00:00") is None
