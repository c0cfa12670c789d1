"""Backfill, continuous and publish: what they choose, and that one window never stops the rest."""

from datetime import UTC, date, datetime, timedelta

from babylon.errors import TrainingError
from babylon.settings import Settings
from babylon.store import Store
from babylon.windows import Window, WindowState, window_at
from flows.backfill import backfill
from flows.continuous import due, next_batch, sleep_until
from flows.publish_dataset import publish_dataset
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"
CENTURY = {"lookback_hours": 876_000}
START = datetime(2025, 11, 14, 9, tzinfo=UTC)


async def test_backfill_trains_what_waits_and_the_second_time_nothing(
    played: Settings, workshop: Workshop
) -> None:
    results = await backfill(overrides=CENTURY)
    assert [(r.window_id, r.status) for r in results] == [(WINDOW, WindowState.DEPLOYED)]
    assert await backfill(overrides=CENTURY) == []


async def test_backfill_takes_only_the_hours_that_it_is_asked_for(
    played: Settings, workshop: Workshop
) -> None:
    assert await backfill() == []
    assert await backfill(hours=1, overrides=CENTURY) == []


async def test_a_window_that_fails_is_a_result_and_the_next_is_tried(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await store.pool.execute(
        "INSERT INTO trajectories SELECT (jsonb_populate_record(t, jsonb_build_object("
        "'id', t.id || '+', 'trajectoryId', t.\"trajectoryId\" || '+',"
        "'windowId', '2025-11-14T10:00', 'startTime', t.\"startTime\" + interval '1 hour',"
        "'endTime', t.\"endTime\" + interval '1 hour'))).* FROM trajectories t"
    )
    workshop.training_error = TrainingError("loss is nan")
    results = await backfill(overrides=CENTURY)
    assert [r.window_id for r in results] == [WINDOW, "2025-11-14T10:00"]
    assert {(r.status, r.reason) for r in results} == {(WindowState.FAILED, "loss is nan")}


async def test_daily_publish_writes_the_day_again_and_only_that_day(
    played: Settings, workshop: Workshop
) -> None:
    await backfill(overrides=CENTURY)
    (published,) = await publish_dataset(date(2025, 11, 14))
    assert published.window_id == WINDOW and published.rows >= 5
    assert await publish_dataset() == []


def test_continuous_waits_for_the_close_of_the_last_of_n_windows_and_the_grace() -> None:
    batch = next_batch(Window(START, 15), frequency=3)
    assert [window.id[-5:] for window in batch] == ["09:00", "09:15", "09:30"]
    assert due(batch, grace_s=90) == START + timedelta(minutes=46, seconds=30)


async def test_sleeping_ends_at_the_moment() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=0.2)
    await sleep_until(moment)
    assert timedelta() <= datetime.now(UTC) - moment < timedelta(seconds=5)
    await sleep_until(window_at(moment).start)  # past: at once
