"""Backfill, continuous and publish: what they choose, and that one window never stops the rest."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
from prefect.client.orchestration import get_client

from babylon.core.errors import DatabaseError, ServingError, TrainingError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.types import Published, WindowResult
from babylon.core.windows import Clock, WindowState
from babylon.dataset.build import build_tables
from babylon.flows import attempt
from babylon.flows.backfill import backfill
from babylon.flows.continuous import continuous, next_look
from babylon.flows.publish_dataset import publish_dataset
from babylon.ops.prefect_env import results
from babylon.store import Store
from babylon.store.holds import hold
from babylon.store.routes import current_route
from babylon.tasks.progress import listener
from tests.flows.conftest import Workshop, play_the_next_hour
from tests.hub_double import TOKEN, HubState
from tests.switchable_relay import SwitchableRelay

WINDOW = "2025-11-14T09:00"
CENTURY = {"windows": {"lookback_hours": 876_000}}
START = datetime(2025, 11, 14, 9, tzinfo=UTC)


async def test_backfill_trains_each_window_once(played: Settings, workshop: Workshop) -> None:
    results = await backfill(overrides=CENTURY)
    assert [(r.window_id, r.status) for r in results] == [(WINDOW, WindowState.DEPLOYED)]
    assert await backfill(overrides=CENTURY) == []


async def test_backfill_takes_only_the_given_hours(played: Settings, workshop: Workshop) -> None:
    assert await backfill() == []
    assert await backfill(hours=1, overrides=CENTURY) == []


async def test_a_failed_window_does_not_stop_a_backfill(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await play_the_next_hour(store)
    workshop.training_error = TrainingError("loss is nan")
    results = await backfill(overrides=CENTURY)
    assert [r.window_id for r in results] == [WINDOW, "2025-11-14T10:00"]
    assert {(r.status, r.reason) for r in results} == {(WindowState.FAILED, "loss is nan")}


async def test_a_hold_stops_a_backfill_before_its_next_window(
    played: Settings, store: Store, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play_the_next_hour(store)
    real = attempt.train_window

    async def hold_after(*arguments: Any) -> WindowResult:
        result = await real(*arguments)
        await hold(store, "alice", "the game is being repaired")
        return result

    monkeypatch.setattr(attempt, "train_window", hold_after)
    first, second = await backfill(overrides=CENTURY)
    assert (first.status, second.status) == (WindowState.DEPLOYED, WindowState.READY)
    assert "on hold" in second.reason and workshop.trained == [WINDOW]


async def _backfilled() -> None:
    assert await backfill(overrides=CENTURY) == []


async def _enough(_: datetime) -> None:
    raise TrainingError("enough")


async def _looked() -> None:
    with pytest.raises(TrainingError, match="enough"):
        await anext(continuous(CENTURY))


@pytest.mark.parametrize("run", [_backfilled, _looked])
async def test_a_run_ends_an_experiment_whose_time_is_over_also_while_training_is_on_hold(
    run: Callable[[], Awaitable[None]],
    played: Settings,
    store: Store,
    pages: Callable[[str], Awaitable[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("babylon.flows.continuous.sleep_until", _enough)
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', '/nowhere', 'tiny');"
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason, mode,"
        " challenger_version, share, salt, created_at) VALUES (2, 0, 'operator', '', 'canary', 1,"
        " 0.05, 'salt', now() - interval '169 hours')"
    )
    await hold(store, "reward watch", "the challenger games its reward")
    await run()
    route = await current_route(store)
    assert (route.policy_version, route.split) == (0, None)
    assert route.reason.startswith("canary: undecided after AB_MAX_HOURS=168")
    (page,) = await pages("experiment")
    assert page.startswith("# Experiment salt")


async def test_an_experiment_that_cannot_be_reviewed_does_not_stop_a_backfill(
    played: Settings, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = AsyncMock(side_effect=ServingError("no gateway follows"))
    monkeypatch.setattr("babylon.tasks.experiment.end_without_window", broken)
    (result,) = await backfill(overrides=CENTURY)
    assert (result.status, broken.await_count) == (WindowState.DEPLOYED, 1)


async def test_retention_runs_once_an_hour_also_while_no_window_ends(
    played: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(store, "alice", "the game is being repaired")
    old = results(played.home.root) / "old"
    old.parent.mkdir(parents=True)

    monkeypatch.setattr("babylon.flows.continuous.sleep_until", _enough)
    for run in (_backfilled, _looked):
        for minutes, goes in ((61, True), (50, False), (-50, True)):
            old.touch()
            stamp = played.home.root / "run" / "retention"
            for path, before in ((old, 40 * 24 * 3600), (stamp, minutes * 60)):
                if path.exists():
                    then = datetime.now(UTC).timestamp() - before
                    os.utime(path, (then, then))
            await run()
            assert old.exists() != goes


async def test_a_limit_takes_the_oldest_windows(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await play_the_next_hour(store)
    heard: list[tuple[str, int, int]] = []
    token = listener.set(lambda _, stage, done, total: heard.append((stage, done, total)))
    (first,) = await backfill(overrides=CENTURY, limit=1)
    (second,) = await backfill(overrides=CENTURY, first="2025-11-14", last="2025-11-14T10:00")
    listener.reset(token)
    assert [first.window_id, second.window_id] == [WINDOW, "2025-11-14T10:00"]
    assert {first.status, second.status} == {WindowState.DEPLOYED}
    assert await backfill(overrides=CENTURY) == []
    assert [event for event in heard if event[0] == "windows"] == [
        ("windows", done, 1) for done in (0, 1, 0, 1)
    ]


async def test_a_deployed_run_that_failed_is_red(played: Settings, workshop: Workshop) -> None:
    message = f"1 of 1 windows failed: {WINDOW}: scorer 'none' is unknown"
    with pytest.raises(TrainingError, match=message):
        await backfill(overrides={**CENTURY, "scoring": {"scorer": "none"}}, placement="deployed")


async def test_daily_publish_writes_the_day_again_and_only_that_day(
    played: Settings, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babylon.flows.publish_dataset.yesterday", lambda: date(2025, 11, 13))
    await backfill(overrides=CENTURY)
    published, *others = await publish_dataset(date(2025, 11, 14))
    assert published.window_id == WINDOW and published.rows >= 5 and len(others) == 3
    assert await publish_dataset() == []
    async with get_client() as client:
        names = {run.name for run in await client.read_flow_runs()}
    assert names >= {"2025-11-14", "2025-11-13"} and "None" not in names


async def test_daily_publish_sends_a_day_once_and_no_failure_of_it_fails_a_window(
    played: Settings,
    workshop: Workshop,
    hub: HubState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = {"TO": "owner/play", "LICENSE": "cc0-1.0", "AGENTS": "*", "MODELS_TO": "owner/trader"}
    for name, value in said.items():
        monkeypatch.setenv(f"PUBLISH_{name}", value)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    built: list[str] = []
    real = build_tables

    async def counted(*arguments: Any) -> dict[str, Published]:
        built.append(arguments[2].claim.window_id)
        return await real(*arguments)

    await backfill(overrides=CENTURY)
    # The workshop's checkpoint has no files.
    assert "publish policy after it failed: the checkpoint of policy 1 is gone" in caplog.text
    monkeypatch.setattr("babylon.dataset.publish.build_tables", counted)
    monkeypatch.setattr("babylon.tasks.publish.build_tables", counted)
    first = await publish_dataset(date(2025, 11, 14))
    assert {file.window_id for file in first} == {WINDOW} and built == [WINDOW]
    assert await publish_dataset(date(2025, 11, 14)) == first
    assert hub.commits("datasets/owner/play") == ["Windows of 2025-11-14"]
    sent = hub.repositories["datasets/owner/play"].files
    assert {Path(file.uri).name for file in first} <= {Path(path).name for path in sent}


def test_continuous_waits_for_the_close_of_the_last_of_n_windows_and_the_grace() -> None:
    settings = load_settings(windows={"minutes": 15, "frequency": 3, "grace_s": 90})
    settled = START + timedelta(minutes=7)
    assert next_look(settings.windows, settled) == START + timedelta(minutes=46, seconds=30)


async def test_continuous_catches_up_once_a_look_and_sleeps_over_what_fails(
    played: Settings, store: Store, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that fails is tried once, rests over a look, is tried again, then waits no more."""
    looks: list[datetime] = []

    async def nap(moment: datetime) -> None:
        looks.append(moment)
        workshop.training_error = None
        if len(looks) == 2:
            assert results == [(WINDOW, WindowState.FAILED)]
            await store.pool.execute("UPDATE babylon.windows SET retry_at = now()")
        if len(looks) == 4:
            raise TrainingError("enough")

    monkeypatch.setattr("babylon.flows.continuous.sleep_until", nap)
    workshop.training_error = TrainingError("loss is nan")
    settings = load_settings(**CENTURY)
    results: list[tuple[str, str]] = []
    with pytest.raises(TrainingError, match="enough"):
        async for result in continuous(CENTURY):
            results.append((result.window_id, result.status))
    assert results == [(WINDOW, WindowState.FAILED), (WINDOW, WindowState.DEPLOYED)]
    assert looks[0] <= datetime.now(UTC) + timedelta(seconds=settings.windows.lease_s)


async def test_continuous_ends_at_once_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = {"database": {"url": "postgresql://nobody@127.0.0.1:1/none"}}
    with pytest.raises(DatabaseError):
        await anext(continuous(unreachable))


async def test_continuous_looks_again_soon_when_the_database_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when the next windows close: that is a day later with TRAINING_FREQUENCY_WINDOWS=24."""
    looks: list[timedelta] = []

    @asynccontextmanager
    async def opened(_: Settings) -> AsyncIterator[None]:
        if looks:
            raise ConnectionRefusedError
        yield

    async def nap(moment: datetime) -> None:
        looks.append(moment - datetime.now(UTC))
        if len(looks) == 2:
            raise TrainingError("enough")

    now = AsyncMock(return_value=Clock(now=datetime.now(UTC)))
    for name, value in {
        "open_store": opened,
        "review_running": AsyncMock(),
        "read_clock": now,
        "pending_windows": AsyncMock(return_value=[]),
        "awaits_outcomes": AsyncMock(return_value=""),
        "retention_is_due": lambda _: False,
        "sleep_until": nap,
    }.items():
        monkeypatch.setattr(f"babylon.flows.continuous.{name}", value)
    with pytest.raises(TrainingError, match="enough"):
        await anext(continuous({"windows": {"minutes": 1440, "frequency": 2}}))
    assert looks[1] <= timedelta(minutes=1)


async def test_continuous_outlives_a_database_that_goes_away_and_comes_back(
    played: Settings,
    store: Store,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert played.database.url is not None
    url = urlsplit(played.database.url.get_secret_value())
    assert url.port is not None
    looks = 0
    async with SwitchableRelay(url.port) as relay:

        async def nap(_: datetime) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                relay.shut()
            elif looks == 2:
                assert "the database is unreachable" in caplog.text
                await store.pool.execute("UPDATE babylon.windows SET retry_at = now()")
                workshop.training_error = None
                await relay.open()
            else:
                raise TrainingError("enough")

        through = url._replace(netloc=url.netloc.replace(f":{url.port}", f":{relay.port}"))
        monkeypatch.setenv("DATABASE_URL", through.geturl())
        monkeypatch.setattr("babylon.flows.continuous.sleep_until", nap)
        workshop.training_error = TrainingError("loss is nan")
        results = []
        with pytest.raises(TrainingError, match="enough"):
            async for result in continuous(CENTURY):
                results.append(result.status)
    assert results == [WindowState.FAILED, WindowState.DEPLOYED]
