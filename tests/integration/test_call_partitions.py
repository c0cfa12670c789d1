"""Calls in partitions by day: made ahead, filled once, dropped when they are old."""

from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import NoReturn

import asyncpg
import pytest

from babylon.core.settings_loading import load_settings
from babylon.core.windows import window_at
from babylon.store import Store, call_partitions, open_store
from babylon.store.address import parse_url
from babylon.store.call_partitions import make_partitions, remove_calls
from babylon.store.calls import CALL_COLUMNS, insert_calls
from babylon.store.connection import Connection
from babylon.store.migrate import migrate
from tests.unit.serving.gateway.calls import call

NOW = datetime.now(UTC)


async def _places(store: Store) -> dict[str, str]:
    rows = await store.pool.fetch("SELECT call_id, tableoid::regclass::text FROM babylon.calls")
    return {call_id: place.removeprefix("babylon.") for call_id, place in rows}


async def test_a_call_is_stored_once_in_the_partition_of_its_day(store: Store) -> None:
    far = NOW + timedelta(days=10)
    calls = [call(1), call(2, started_at=far), call(3, started_at=far + timedelta(days=30))]
    await insert_calls(store, calls[1:])  # before the partition of its day is made
    await make_partitions(store, far)
    await make_partitions(store, far)
    for _ in range(2):
        await insert_calls(store, calls)
    assert await _places(store) == {
        "c1": "calls_first",
        "c2": f"calls_{far:%Y%m%d}",
        "c3": "calls_other",
    }


async def test_a_gateways_wrong_clock_makes_no_partitions_of_years(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class YearsAhead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=400)

    async def sleep(_: float) -> NoReturn:
        raise InterruptedError

    monkeypatch.setattr(call_partitions, "datetime", YearsAhead)
    monkeypatch.setattr(call_partitions.asyncio, "sleep", sleep)
    with pytest.raises(InterruptedError):
        await call_partitions.keep_ahead(store)
    made = await store.pool.fetchval(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'babylon.calls'::regclass"
    )
    assert made == 2  # those of a new database


async def test_a_user_who_may_not_create_tables_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refused(*_: object) -> NoReturn:
        raise asyncpg.InsufficientPrivilegeError("permission denied for schema babylon")

    async def sleep(_: float) -> NoReturn:
        raise InterruptedError

    monkeypatch.setattr(call_partitions, "make_partitions", refused)
    monkeypatch.setattr(call_partitions.asyncio, "sleep", sleep)
    with pytest.raises(InterruptedError):
        await call_partitions.keep_ahead(store)
    assert "let this user create tables in the schema babylon" in caplog.text


async def test_an_old_day_is_dropped_once_no_window_of_it_is_in_use(store: Store) -> None:
    days = [NOW + timedelta(days=number) for number in (8, 9, 10)]
    await make_partitions(store, days[-1])
    await insert_calls(store, [call(n, started_at=day) for n, day in enumerate(days)])
    await insert_calls(store, [call(9)])  # deleted from the first partition
    later, kept = NOW + timedelta(days=40), [window_at(days[1], 60)]
    assert await remove_calls(store, later - timedelta(days=30), kept) == 2
    assert await _places(store) == {
        "c1": f"calls_{days[1]:%Y%m%d}",
        "c2": f"calls_{days[2]:%Y%m%d}",
    }
    assert await remove_calls(store, days[2] + timedelta(days=1), []) == 2
    assert await _places(store) == {}
    now = datetime.now(UTC)
    await insert_calls(store, [call(0, started_at=now)])  # no day is left, and it is not lost
    assert await _places(store) == {"c0": "calls_other"}
    await make_partitions(store, now)
    assert await _places(store) == {"c0": f"calls_{now:%Y%m%d}"}


async def test_old_calls_of_policies_of_another_database_go_too(store: Store) -> None:
    """An imported trace has the numbers of the policies that answered it there."""
    there = [call(number, policy_version=version) for number, version in enumerate((7, 7, 900))]
    await insert_calls(store, [*there, call(3, started_at=NOW + timedelta(days=1))])
    kept = [window_at(NOW + timedelta(days=1), 60)]  # so the partition is not dropped
    assert await remove_calls(store, NOW + timedelta(days=30), kept) == 3
    assert await _places(store) == {"c3": "calls_first"}


async def test_a_trace_that_was_imported_lately_keeps_its_day(store: Store) -> None:
    day = NOW + timedelta(days=8)
    await make_partitions(store, day)
    await insert_calls(store, [call(1, started_at=day)])
    await store.pool.execute("UPDATE babylon.calls SET recorded_at = $1", day + timedelta(days=9))
    assert await remove_calls(store, day + timedelta(days=5), []) == 0
    assert await remove_calls(store, day + timedelta(days=10), []) == 1


async def test_a_call_that_is_imported_while_its_day_is_dropped_keeps_the_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = NOW + timedelta(days=8)
    await make_partitions(store, day)
    await insert_calls(store, [call(1, started_at=day)])
    before, turn = day + timedelta(days=5), call_partitions._turn
    recorded = "UPDATE babylon.calls SET recorded_at = $1 WHERE call_id = 'c2'"

    async def imported_meanwhile(connection: Connection) -> bool:
        await insert_calls(store, [call(2, started_at=day)])
        await store.pool.execute(recorded, before + timedelta(days=1))
        return await turn(connection)

    monkeypatch.setattr(call_partitions, "_turn", imported_meanwhile)
    assert await remove_calls(store, before, []) == 0
    assert sorted(await _places(store)) == ["c1", "c2"]


async def test_a_day_stays_while_an_import_into_it_is_not_committed(store: Store) -> None:
    day = NOW + timedelta(days=8)
    await make_partitions(store, day)
    await insert_calls(store, [call(1, started_at=day)])
    async with store.pool.acquire() as other, other.transaction():
        await other.execute("UPDATE babylon.calls SET recorded_at = $1", day + timedelta(days=9))
        assert await remove_calls(store, day + timedelta(days=5), []) == 0
    assert sorted(await _places(store)) == ["c1"]


async def test_a_gateway_writes_through_the_migration(
    blank_database_url: str, tmp_path: Path
) -> None:
    address = parse_url(blank_database_url)
    await migrate(address, "0006")
    older = await asyncpg.connect(blank_database_url)
    columns = ", ".join(CALL_COLUMNS)
    places = ", ".join(f"${n + 1}" for n in range(len(CALL_COLUMNS)))
    insert = await older.prepare(
        f"INSERT INTO babylon.calls ({columns}) VALUES ({places}) ON CONFLICT DO NOTHING"
    )

    async def write(number: int) -> None:
        row = call(number, started_at=datetime.now(UTC))
        await insert.fetch(*(getattr(row, name) for name in CALL_COLUMNS))

    try:
        await write(1)
        await migrate(address)
        await write(1)
        await write(2)
    finally:
        await older.close()
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings) as store:
        assert sorted(await _places(store)) == ["c1", "c2"]
