"""Runs whose worker was killed: the dead ones end in Prefect, the living ones end with ``down``."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from aiohttp import web

from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.runs import end_dead_runs, run_processes, stop_runs


@contextmanager
def run_process(run: str, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with the environment of a run, as a worker of the home starts it."""
    about = {"PREFECT__FLOW_RUN_ID": run, "BABYLON_HOME": str(home)}
    command = [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(command, env=about, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # it runs
        try:
            yield process
        finally:
            process.kill()


class Runs:
    """Prefect's API as far as runs are looked for and ended."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.found: list[dict[str, Any]] | None = None  # seen a moment ago; None: as they are

    def add(self, state: str, seconds: float) -> str:
        run, since = str(uuid4()), datetime.now(UTC) - timedelta(seconds=seconds)
        about = {"type": state, "timestamp": since.isoformat()}
        self.runs[run] = {"id": run, "name": run, "state_type": state, "state": about}
        return run

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/api/flow_runs/filter", self._filter)
        app.router.add_get("/api/flow_runs/{run}", self._get)
        app.router.add_post("/api/flow_runs/{run}/set_state", self._set)
        return app

    async def _filter(self, request: web.Request) -> web.Response:
        asked = (await request.json())["flow_runs"]
        if "parent_task_run_id" in asked:  # in tests/flows, with a real Prefect
            return web.json_response([])
        wanted = asked["state"]["type"]["any_"]
        found = [one for one in self.runs.values() if one["state_type"] in wanted]
        return web.json_response(self.found or found)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.runs[request.match_info["run"]])

    async def _set(self, request: web.Request) -> web.Response:
        state = (await request.json())["state"]["type"]
        self.runs[request.match_info["run"]]["state_type"] = state
        return web.json_response({})


@pytest.fixture
async def prefect() -> AsyncIterator[tuple[Runs, PrefectApi]]:
    runs = Runs()
    runner = web.AppRunner(runs.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runs, PrefectApi(url=f"http://127.0.0.1:{runner.addresses[0][1]}/api")
    await runner.cleanup()


async def test_a_run_without_a_process_crashes_and_a_young_or_living_one_does_not(
    prefect: tuple[Runs, PrefectApi], tmp_path: Path
) -> None:
    runs, api = prefect
    dead, pending = runs.add("RUNNING", 90), runs.add("PENDING", 90)
    young, done = runs.add("PENDING", 5), runs.add("COMPLETED", 90)
    living = runs.add("RUNNING", 90)
    with run_process(living, tmp_path):
        async with aiohttp.ClientSession() as http:
            await end_dead_runs(http, api)
    states = [runs.runs[run]["state_type"] for run in (dead, pending, young, done, living)]
    assert states == ["CRASHED", "CRASHED", "PENDING", "COMPLETED", "RUNNING"]


async def test_a_run_that_ended_meanwhile_keeps_its_state(
    prefect: tuple[Runs, PrefectApi],
) -> None:
    runs, api = prefect
    run = runs.add("RUNNING", 90)
    runs.found = [dict(runs.runs[run])]
    runs.runs[run]["state_type"] = "COMPLETED"
    async with aiohttp.ClientSession() as http:
        await end_dead_runs(http, api)
    assert runs.runs[run]["state_type"] == "COMPLETED"


def test_the_runs_of_a_home_end_with_it_and_those_of_another_do_not(tmp_path: Path) -> None:
    ours, others = str(uuid4()), str(uuid4())
    with (
        run_process(ours, tmp_path / "ours") as one,
        run_process(others, tmp_path / "others") as other,
    ):
        assert run_processes().keys() >= {ours, others}
        assert stop_runs(tmp_path / "ours") == 1
        assert one.poll() is not None and other.poll() is None
