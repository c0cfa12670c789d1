"""Writes beside the flow are there whole or not at all; writing it again adds nothing."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.matrix import RECORDED, Case
from tests.faults.processes import Worker
from tests.faults.world import Place, World

TABLES = ("trajectories", "llm_call_logs", "market_outcomes", "babylon.policies", "babylon.routes")
CLOCKS = {"createdAt", "created_at"}


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
async def test_a_killed_writer_leaves_all_or_none(case: Case, world: World, tmp_path: Path) -> None:
    (crash,) = case.crashes
    act, moment = crash.split(".")
    target = f"tests.faults.acts:{act}"
    async with world.place(tmp_path / "home") as place:
        await place.store.pool.execute("DELETE FROM babylon.routes")
        await place.store.pool.execute("DELETE FROM babylon.policies")
        before = await tables(place)
        with Worker(place.settings, target, failpoint=crash) as worker:
            assert await worker.ended() == -signal.SIGKILL, worker.said
        killed = await tables(place)
        with Worker(place.settings, target) as worker:
            code, said = await worker.ended(), worker.said
        after = await tables(place)
    assert (killed == before) == (moment != "after")
    assert after != before and (moment != "after" or after == killed)
    assert code == 0 or ("is stored already" in said and act == "recorder"), said


async def tables(place: Place) -> list[list[dict[str, Any]]]:
    return [
        [
            {name: value for name, value in row.items() if name not in CLOCKS}
            for row in await place.store.pool.fetch(f"SELECT * FROM {table} ORDER BY 1")
        ]
        for table in TABLES
    ]
