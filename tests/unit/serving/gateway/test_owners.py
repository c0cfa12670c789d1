"""The owners of trajectories while the database is away, and when it is back."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from babylon.serving.gateway.play import owners as module
from babylon.serving.gateway.play.owners import TrajectoryOwners
from babylon.serving.openai_wire import RequestError
from babylon.store import Store

Row = dict[str, str | None]


class Database:
    """The table ``plays`` as the query claims it; away until ``back``."""

    def __init__(self) -> None:
        self.back = False
        self.rows: dict[str, str] = {}

    @property
    def pool(self) -> "Database":
        return self

    async def fetch(
        self, query: str, ids: Sequence[str], keys: Sequence[str], *_: object
    ) -> list[Row]:
        if not self.back:
            raise ConnectionRefusedError
        for name, key in zip(ids, keys, strict=True):
            self.rows.setdefault(name, key)
        return [
            {"trajectory_id": name, "key_id": self.rows[name], "started_by": None} for name in ids
        ]


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def owners(database: Database, monkeypatch: pytest.MonkeyPatch) -> TrajectoryOwners:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(module, "MAX_UNSAVED", 3)
    return TrajectoryOwners(cast(Store, database))


async def saved(owners: TrajectoryOwners) -> None:
    running = asyncio.create_task(owners.run())
    async with asyncio.timeout(5):
        while owners._unsaved:
            await asyncio.sleep(0.001)
    running.cancel()


async def test_the_first_caller_owns_it_also_when_the_database_comes_back_between(
    owners: TrajectoryOwners, database: Database
) -> None:
    await owners.require("t", "alice", None)
    with pytest.raises(RequestError, match="belongs to another key"):
        await owners.require("t", "mallory", None)
    owners._owners.clear()  # as if it were no longer cached
    database.back = True
    with pytest.raises(RequestError, match="belongs to another key"):
        await owners.require("t", "mallory", None)
    await saved(owners)
    assert database.rows == {"t": "alice"}


async def test_of_too_many_claims_the_oldest_is_made_again_by_its_next_call(
    owners: TrajectoryOwners, database: Database
) -> None:
    for number in range(5):
        await owners.require(f"t{number}", "alice", None)
    assert [*owners._unsaved] == ["t2", "t3", "t4"]
    database.back = True
    await saved(owners)
    assert [*database.rows] == ["t2", "t3", "t4"]
    await owners.require("t0", "alice", None)  # it was not kept in the cache either
    assert database.rows["t0"] == "alice"


@pytest.mark.parametrize(
    ("bound", "value", "left"), [("MAX_CACHED", 2, ["t7", "t8"]), ("REMEMBERED_S", 0.0, [])]
)
async def test_the_cache_is_bounded_in_number_and_in_age(
    database: Database, monkeypatch: pytest.MonkeyPatch, bound: str, value: float, left: list[str]
) -> None:
    monkeypatch.setattr(module, bound, value)
    owners = TrajectoryOwners(cast(Store, database))
    database.back = True
    for number in range(9):
        await owners.require(f"t{number}", "alice", None)
    assert [*owners._owners] == left
    with pytest.raises(RequestError, match="belongs to another key"):
        await owners.require("t0", "mallory", None)
