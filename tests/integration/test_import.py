"""``babylon db import`` with the game's real rows."""

from datetime import datetime
from pathlib import Path

import pytest

from babylon.core.errors import DatabaseError
from babylon.core.settings import load_settings
from babylon.formats.import_files import import_files
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
        ('{"id": "a\\u0000"}', r"users\.jsonl:2: unsupported Unicode escape sequence"),
    ],
)  # fmt: skip
async def test_a_bad_line_aborts_all(store: Store, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "users.jsonl"
    file.write_text('{"id": "good"}\n' + line)
    with pytest.raises(DatabaseError, match=message):
        await import_files(store, [REAL_ROWS / "market_outcomes.jsonl", file])
    assert await _count(store, "User") == await _count(store, "market_outcomes") == 0


async def test_a_trajectory_of_an_unknown_user_is_named(store: Store) -> None:
    with pytest.raises(DatabaseError, match=r"trajectories\.jsonl:1: .*is not present in table"):
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
