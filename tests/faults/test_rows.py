"""Two runs at once, and rows that come late or in another order."""

import asyncio
from pathlib import Path
from typing import Any

from tests.faults.processes import Worker
from tests.faults.world import World

RECORDER = "tests.faults.acts:recorder"
SHUFFLED = ("trajectories", "llm_call_logs", "babylon.calls")


async def test_one_of_two_runs_of_a_window_trains(world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home", windows={"lease_s": 60.0}) as place:
        with place.worker() as one, place.worker() as other:
            codes = [await one.ended(), await other.ended()]
            said = one.said if codes[0] else other.said
        assert sorted(codes) == [0, 1], (codes, said)
        assert "is leased by" in said or "nothing was changed" in said
        outcome = await place.outcome()
    assert [row["state"] for row in outcome["window"]] == ["deployed"]
    assert len(outcome["trained"]) == 7 and len(outcome["policies"]) == 3
    assert len(outcome["judgments"]) == place.judge.requests


async def test_a_row_after_the_reading_is_in_no_batch(world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home") as place:
        with place.worker("collect.reading=stop") as worker:
            await worker.stopped()
            with Worker(place.settings, RECORDER) as late:
                assert await late.ended() == 0, late.said
            await place.lease_over()
            worker.go_on()
            assert await worker.ended() == 0, worker.said
        outcome = await place.outcome()
        code, said = await place.run()
        assert code == 1 and "nothing was changed" in said
        assert await place.outcome() == outcome
    plays = {row["trajectoryId"]: row["usedInTraining"] for row in outcome["plays"]}
    assert plays["recorded"] is False
    assert [row["metrics"]["late"] for row in outcome["window"]] == [1]
    assert "recorded" not in {row["trajectory_id"] for row in outcome["trained"]}


async def test_the_order_in_which_rows_came_changes_nothing(world: World, tmp_path: Path) -> None:
    async def trained(home: Path, *, shuffled: bool) -> dict[str, Any]:
        async with world.place(home) as place:
            if shuffled:
                async with place.store.pool.acquire() as connection, connection.transaction():
                    for number, table in enumerate(SHUFFLED):
                        copy = f"CREATE TEMP TABLE t{number} ON COMMIT DROP AS SELECT * FROM"
                        await connection.execute(f"{copy} {table}")
                        await connection.execute(f"DELETE FROM {table}")
                        await connection.execute(
                            f"INSERT INTO {table} SELECT * FROM t{number} ORDER BY 1 DESC"
                        )
            code, said = await place.run()
            assert code == 0, said
            return await place.outcome()

    straight, shuffled = await asyncio.gather(
        trained(tmp_path / "straight", shuffled=False),
        trained(tmp_path / "shuffled", shuffled=True),
    )
    assert straight == shuffled
