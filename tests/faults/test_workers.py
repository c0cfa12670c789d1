"""Four worker processes, many windows and a random SIGKILL now and then: each commits once."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from babylon.core.settings import Settings
from babylon.core.windows import Window, WindowState
from babylon.store import Store
from babylon.store.policies import ensure_base, list_policies
from babylon.store.windows import list_windows
from tests.integration.test_window_machine import PLAY

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
WORKERS, EACH = 4, 3  # trajectories a window
# a longer run on demand: BABYLON_FAULT_KILLS=200 BABYLON_FAULT_WINDOWS=1000
KILLS = int(os.environ.get("BABYLON_FAULT_KILLS", "8"))
WINDOWS = int(os.environ.get("BABYLON_FAULT_WINDOWS", "200"))


class Fleet:
    """Keeps four workers alive; each kill is due once so many steps have been taken in all."""

    def __init__(self, settings: Settings, windows: list[Window]) -> None:
        self._settings, self._windows = settings, windows
        self._random = Random(1)
        span = 5 * len(windows)  # steps that are certainly taken
        self._due = sorted(self._random.sample(range(20, span), KILLS))
        self._steps = 0
        self.killed: list[str] = []  # the step that each died at

    async def run(self) -> None:
        await asyncio.gather(*(self._keep_alive(number) for number in range(WORKERS)))

    async def _keep_alive(self, number: int) -> None:
        for life in range(KILLS + 1):
            process = await self._start(seed=100 * number + life)
            if await self._watch(process) == 0:
                return
        raise AssertionError("a worker died of more than its kills")

    async def _start(self, seed: int) -> Process:
        assert self._settings.database.url is not None
        environment = {
            **os.environ,
            "DATABASE_URL": self._settings.database.url.get_secret_value(),
            "BABYLON_HOME": str(self._settings.home.root),
            "POLARS_MAX_THREADS": "1",
        }
        ids = [window.id for window in self._windows]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.faults.worker", str(seed), str(LEASE_S), *ids),
            cwd=ROOT,
            env=environment,
            stdout=PIPE,
        )

    async def _watch(self, process: Process) -> int:
        assert process.stdout is not None
        async for line in process.stdout:
            self._steps += 1
            if self._due and self._steps >= self._due[0]:
                self._due.pop(0)
                self.killed.append(line.decode().split(maxsplit=1)[1].strip())
                process.kill()
                await process.wait()
                return -9
        return await process.wait()


async def test_four_killed_workers_commit_windows_once(settings: Settings, store: Store) -> None:
    windows = [Window(datetime(2025, 1, 1, tzinfo=UTC))]
    while len(windows) < WINDOWS:
        windows.append(windows[-1].next())
    await ensure_base(store, uri="file:///base", base_model="tiny")
    await store.pool.execute("INSERT INTO \"User\" (id) VALUES ('player')")
    await store.pool.executemany(
        PLAY,
        [
            (f"{window.id}-{number}", window.start.replace(tzinfo=None), window.id)
            for window in windows
            for number in range(EACH)
        ],
    )
    fleet = Fleet(settings, windows)
    async with asyncio.timeout(60 + 2 * KILLS + WINDOWS):
        await fleet.run()

    assert len(fleet.killed) == KILLS
    rows = await list_windows(store)
    assert {row.window_id for row in rows} == {window.id for window in windows}
    assert {(row.state, row.leased) for row in rows} == {(WindowState.DEPLOYED, False)}
    policies = [policy for policy in await list_policies(store) if policy.batch_id]
    assert sorted(str(policy.window_id) for policy in policies) == [w.id for w in windows]
    trained = await store.pool.fetch(
        "SELECT window_id, array_agg(trajectory_id ORDER BY trajectory_id)"
        " FROM babylon.trained GROUP BY 1"
    )
    assert {row[0]: row[1] for row in trained} == {
        window.id: [f"{window.id}-{number}" for number in range(EACH)] for window in windows
    }
    assert sum(row.epoch for row in rows) > WINDOWS  # some were taken over
