"""Stages on a pool with a real worker of Prefect, which runs each of them as a process."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError

from babylon.core.errors import TrainingError
from babylon.core.settings import PrefectSettings
from babylon.core.types import Claim
from babylon.tasks import pool
from tests.flows.staged import staged

POOL, ROOT = "of-staged", Path(__file__).parents[2]
# A worker that is gone for ten minutes: WORKER_AWAY_S=600 pytest -k waits_for_a_worker
AWAY_S = float(os.environ.get("WORKER_AWAY_S", "3"))


@pytest.fixture(autouse=True)
async def deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deployment ``staged/staged`` on a pool of its own, instead of ``gpu-stage``."""
    monkeypatch.setattr(pool, "DEPLOYMENT", "staged/staged")
    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        except ObjectAlreadyExists:
            return
        await client.create_deployment(
            await client.create_flow(staged),
            "staged",
            work_pool_name=POOL,
            entrypoint="tests.flows.staged.staged",
            pull_steps=[],
            parameter_openapi_schema=staged.parameters.model_dump(),
            enforce_parameter_schema=True,
        )


@pytest.fixture
async def api() -> AsyncIterator[str]:
    async with get_client() as client:
        yield str(client.api_url)


@contextmanager
def worker(api: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker of the pool. It is killed at the end, as a machine that loses its power."""
    about = {"PREFECT_API_URL": api, "PREFECT_WORKER_QUERY_SECONDS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", POOL]
    process = subprocess.Popen(command, env=os.environ | about, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@flow(name="parent-of-staged")
async def parent(ending: str, mark: str, epoch: int = 1) -> object:
    parameters: dict[str, object] = {"ending": ending, "mark": mark}
    claim = Claim(window_id="2025-11-14T09:00", epoch=epoch, owner="box:1:a")
    first = await pool.on_pool("train", parameters, claim, PrefectSettings())
    assert await pool.on_pool("train", parameters, claim, PrefectSettings()) == first
    return first


async def states() -> list[str | None]:
    """Return the states of the pool's runs, the oldest first."""
    async with get_client() as client:
        runs = await client.read_flow_runs()
    ours: list[FlowRun] = [run for run in runs if run.work_pool_name == POOL]
    return [run.state_name for run in sorted(ours, key=lambda run: str(run.created))]


async def until_begun(mark: Path) -> int:
    """Return the pid of the stage's process."""
    async with asyncio.timeout(300):
        while not (mark.exists() and mark.read_text().strip()):
            await asyncio.sleep(0.2)
    return int(mark.read_text().split()[-1])


async def test_a_stage_waits_for_a_worker_outlives_its_killed_process_and_is_not_run_again(
    api: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    waiting = asyncio.create_task(parent("be killed once", str(mark)))
    await asyncio.sleep(AWAY_S)
    assert not waiting.done() and not mark.exists()  # its worker is away
    with worker(api):
        async with asyncio.timeout(300):
            # The second question of the same attempt gets the first one's run.
            assert await waiting == {"begun": 2}
    assert (await states())[-2:] == ["Crashed", "Completed"]
    assert len(mark.read_text().split()) == 2


async def test_a_failure_of_the_stage_is_the_parents_and_a_cancelled_parent_ends_the_process(
    api: str, tmp_path: Path
) -> None:
    with worker(api):
        with pytest.raises(TrainingError, match="no memory for 3 sequences"):
            await parent("fail", str(tmp_path / "failed"), epoch=2)
        mark = tmp_path / "hanging"
        hanging = asyncio.create_task(parent("hang", str(mark), epoch=3))
        pid = await until_begun(mark)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        async with asyncio.timeout(120):
            while psutil.pid_exists(pid) or (await states())[-1] != "Cancelled":
                await asyncio.sleep(0.2)
    assert (await states())[-2:] == ["Failed", "Cancelled"]


async def test_bad_parameters_are_refused_before_a_run_is_made(tmp_path: Path) -> None:
    before = await states()
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        await parent("explode", str(tmp_path / "mark"), epoch=4)
    assert await states() == before
