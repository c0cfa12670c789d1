"""``babylon db import`` with the game's real rows."""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from babylon.core.errors import DatabaseError
from babylon.core.settings_loading import load_settings
from babylon.formats.import_files import import_files
from babylon.formats.staging import Staging
from babylon.store import Store, open_store
from tests.conftest import REAL_ROWS

FILES = sorted(REAL_ROWS.glob("*.jsonl"))
COUNTS = {"User": 12, "trajectories": 15, "llm_call_logs": 157, "market_outcomes": 3}


async def _count(store: Store, table: str) -> int:
    count: int = await store.pool.fetchval(f'SELECT count(*) FROM "{table}"')
    return count


@pytest.mark.parametrize("backwards", [False, True])
async def test_all_real_files_in_any_order(store: Store, backwards: bool) -> None:
    assert await import_files(store, FILES[:: -1 if backwards else 1]) == COUNTS
    assert {table: await _count(store, table) for table in COUNTS} == COUNTS
    row = await store.pool.fetchrow(
        'SELECT * FROM trajectories WHERE "trajectoryId" = $1', "247647311037988864"
    )
    assert row is not None
    assert row["startTime"] == datetime(2025, 11, 14, 9, 2, 0, 17_000)
    assert (row["finalBalance"], row["usedInTraining"]) == (10061.61208284628, False)


async def test_a_second_import_adds_nothing(store: Store) -> None:
    await import_files(store, FILES)
    assert await import_files(store, FILES) == dict.fromkeys(COUNTS, 0)


async def test_keys_tell_the_table_if_the_name_does_not(store: Store, tmp_path: Path) -> None:
    for name in ("users", "trajectories", "llm_call_logs", "market_outcomes"):
        (tmp_path / f"part-{name}.json").write_bytes((REAL_ROWS / f"{name}.jsonl").read_bytes())
    assert await import_files(store, tmp_path.iterdir()) == COUNTS


async def test_columns_that_a_row_lacks_get_their_defaults(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "users.jsonl"
    file.write_text('{"id": "only"}\n\n')
    assert await import_files(store, [file]) == {"User": 1}
    assert await store.pool.fetchval('SELECT "virtualBalance" FROM "User"') == 1000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"users\.jsonl:2: not a JSON object"),
        ("[1]", r"users\.jsonl:2: not a JSON object"),
        ("{}", r"users\.jsonl:2: the object has no keys"),
        ('{"id": "a", "age": 7}', r'users\.jsonl:2: table User has no column age'),
        ('{"id": null}', r'users\.jsonl:2: null value in column "id"'),
        ('{"id": "a", "isAgent": "perhaps"}', r"users\.jsonl:2: invalid input syntax"),
        ('{"id": "a\\u0000"}', r"users\.jsonl:2: invalid byte sequence.* 0x00"),
    ],
)  # fmt: skip
async def test_a_bad_line_aborts_all(store: Store, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "users.jsonl"
    file.write_text('{"id": "good"}\n' + line)
    with pytest.raises(DatabaseError, match=message):
        await import_files(store, [REAL_ROWS / "market_outcomes.jsonl", file])
    assert await _count(store, "User") == await _count(store, "market_outcomes") == 0


async def test_a_trajectory_of_an_unknown_user_is_named(store: Store) -> None:
    with pytest.raises(
        DatabaseError, match=r"jsonl:1: table User has no row of agentId '.+': .*users.jsonl"
    ):
        await import_files(store, [REAL_ROWS / "trajectories.jsonl"])


async def test_files_that_tell_no_table(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"cannot read .*missing\.jsonl: No such file"):
        await import_files(store, [tmp_path / "missing.jsonl"])
    odd = tmp_path / "odd.jsonl"
    odd.write_text("")
    with pytest.raises(DatabaseError, match="empty, and its name is not one of"):
        await import_files(store, [odd])
    odd.write_text('{"id": "1"}')
    with pytest.raises(DatabaseError, match="the keys id fit 7 tables"):
        await import_files(store, [odd])


async def test_a_foreign_database_takes_no_import(blank_database_url: str, tmp_path: Path) -> None:
    import asyncpg

    game = await asyncpg.connect(blank_database_url)
    await game.execute('CREATE TABLE "User" (id text)')
    await game.close()
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        with pytest.raises(DatabaseError, match="the game's own"):
            await import_files(store, FILES)


class Interrupted(Exception):
    """The end of the process that imports."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """End the import after a number of stagings of two rows each; list the rows of each COPY."""
    monkeypatch.setattr("babylon.formats.staging._CHUNK_ROWS", 2)
    copy, stage, copied = Staging._copy, Staging.stage, list[int]()

    async def counted(staging: Staging, connection: Any, table: str, rows: Any) -> None:
        copied.append(len(rows))
        await copy(staging, connection, table, rows)

    monkeypatch.setattr(Staging, "_copy", counted)

    def arm(after: int) -> list[int]:
        left = iter(range(after))

        async def ended(*arguments: Any) -> None:
            await stage(*arguments)
            if next(left, None) is None:
                raise Interrupted

        monkeypatch.setattr(Staging, "stage", ended)
        copied.clear()
        return copied

    return arm


async def _staged(store: Store) -> int:
    count: int = await store.pool.fetchval(
        "SELECT count(*) FROM pg_tables WHERE schemaname = 'babylon' AND tablename ~ '^import_.*_'"
        " AND tablename <> 'import_progress'"
    )
    return count + int(await store.pool.fetchval("SELECT count(*) FROM babylon.import_progress"))


async def test_an_interrupted_import_shows_nothing_and_goes_on_where_it_stopped(
    store: Store, interrupt: Callable[[int], list[int]]
) -> None:
    interrupt(12)
    with pytest.raises(Interrupted):
        await import_files(store, FILES)
    assert [await _count(store, table) for table in COUNTS] == [0, 0, 0, 0]
    assert await _staged(store)
    before = int(await store.pool.fetchval("SELECT sum(lines) FROM babylon.import_progress"))
    assert before == 24  # 12 chunks of two rows, with the one that was cut off behind its commit
    copied = interrupt(1000)
    assert await import_files(store, FILES) == COUNTS
    assert sum(copied) == sum(COUNTS.values()) - before
    assert await _staged(store) == 0
    assert await import_files(store, FILES) == dict.fromkeys(COUNTS, 0)


async def test_a_changed_file_is_imported_from_its_beginning(
    store: Store, tmp_path: Path, interrupt: Callable[[int], list[int]]
) -> None:
    file = tmp_path / "users.jsonl"
    file.write_text("".join(f'{{"id": "{n}"}}\n' for n in range(9)))
    interrupt(2)
    with pytest.raises(Interrupted):
        await import_files(store, [file])
    file.write_text("".join(f'{{"id": "new {n}"}}\n' for n in range(9)))
    interrupt(1000)
    assert await import_files(store, [file]) == {"User": 9}
    assert await store.pool.fetchval("""SELECT count(*) FROM "User" WHERE id LIKE 'new %'""") == 9
    await store.pool.execute(
        "UPDATE babylon.import_progress SET updated_at = now() - interval '2 days'"
    )
    assert await _staged(store)
    await import_files(store, [file])  # clears what nobody went on with
    assert await _staged(store) == 0


@pytest.mark.parametrize("bad", ['{"id": null}', '{"id": "x", "virtualBalance": "much"}', "{"])
async def test_a_bad_line_far_behind_is_named_and_leaves_nothing(
    bad: str, store: Store, tmp_path: Path, interrupt: Callable[[int], list[int]]
) -> None:
    interrupt(1000)
    file = tmp_path / "users.jsonl"
    good = ["", *(f'{{"id": "{n}", "username": null}}' for n in range(8)), '{"id": "other keys"}']
    file.write_text("\n".join([*good, bad, '{"id": "last"}']))
    with pytest.raises(DatabaseError, match=rf"users\.jsonl:{len(good) + 1}: ") as raised:
        await import_files(store, [file])
    assert "import_" not in str(raised.value)  # the table's own name
    assert await _count(store, "User") == 0 and await _staged(store) == 0


async def test_two_imports_of_the_same_files_do_not_mix(
    store: Store, interrupt: Callable[[int], list[int]]
) -> None:
    copied = interrupt(1000)
    results = await asyncio.gather(
        import_files(store, FILES), import_files(store, FILES), return_exceptions=True
    )
    assert COUNTS in results
    (other,) = (result for result in results if result != COUNTS)
    assert isinstance(other, DatabaseError) and "imported already" in str(other)
    assert sum(copied) == sum(COUNTS.values())
    assert {table: await _count(store, table) for table in COUNTS} == COUNTS


async def test_values_are_stored_as_postgres_reads_them(store: Store, tmp_path: Path) -> None:
    text = 'tab\t, line\n, back\\slash, "quote", \\N and é'
    rows = [
        {"id": "a", "windowId": "2025-11-14T09:00", "question": text, "newsEvents": [{"a": None}]},
        {"id": "b", "windowId": "2025-11-14T09:00", "question": None, "volume": 1e-2},
        {"id": "a", "windowId": "2025-11-14T10:00"},
    ]
    file = tmp_path / "market_outcomes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert await import_files(store, [file]) == {"market_outcomes": 2}
    first, second = await store.pool.fetch("SELECT * FROM market_outcomes ORDER BY id")
    assert (first["question"], first["newsEvents"]) == (text, [{"a": None}])
    assert first["windowId"] == "2025-11-14T09:00"  # the first of two equal ids
    assert (second["question"], float(second["volume"])) == (None, 0.01)
