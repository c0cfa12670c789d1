"""Workers of a machine of its own, and the GPUs that each of them gets."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from babylon.core.errors import ServingError
from babylon.core.processes import lives
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up import remote_worker, teller
from babylon.ops.up.remote_worker import RemoteWorker
from babylon.ops.up.teller import Teller

FIRST, SECOND = "GPU-8f3a1b2c-4d5e", "GPU-9a4b2c3d-5e6f"


def test_gpus_that_are_named_by_their_uuid_are_handed_on_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{FIRST},{SECOND}")
    settings = load_settings(training={"processes": 1})
    given = [variables for _, variables in RemoteWorker(settings, "gpu")._workers()]
    assert given == [{"CUDA_VISIBLE_DEVICES": FIRST}, {"CUDA_VISIBLE_DEVICES": SECOND}]


def test_gpus_that_are_too_few_for_an_update_get_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    settings = load_settings(training={"processes": 2})
    given = [variables for _, variables in RemoteWorker(settings, "gpu")._workers()]
    assert given == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]


@pytest.mark.parametrize(("pool", "tells"), [("cpu", True), ("gpu", False)])
async def test_workers_of_the_pool_cpu_tell_news_because_no_supervisor_runs(
    pool: str, tells: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running, telling = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def block(*_: object, **__: object) -> AsyncIterator[None]:
        yield

    async def done(*_: object) -> None:
        pass

    async def create_pools(_: aiohttp.ClientSession, api: PrefectApi) -> None:
        # On the server's own machine too: runs of other machines are no dead ones of this.
        assert not api.embedded

    async def works(*_: object) -> None:
        running.set()
        await asyncio.Event().wait()

    async def tell(_: Teller) -> None:
        telling.set()

    for name in ("open_store", "setting_up", "supervised"):
        monkeypatch.setattr(remote_worker, name, block)
    for name in ("set_up_prefect", "until_healthy", "take_up_lost"):
        monkeypatch.setattr(remote_worker, name, done)
    monkeypatch.setattr(remote_worker, "create_pools", create_pools)
    monkeypatch.setattr(remote_worker, "check", lambda _: None)
    monkeypatch.setattr(remote_worker, "keep_logs_small", works)
    monkeypatch.setattr(Teller, "set_up_and_tell", tell)
    settings = load_settings(
        home=tmp_path,
        artifact_store=f"file://{tmp_path}/bucket",
        database={"url": "postgresql://x@127.0.0.1/x"},
        prefect={"api_url": "http://127.0.0.1:4200/api"},
    )
    working = asyncio.create_task(RemoteWorker(settings, pool).run())
    await running.wait()
    await asyncio.sleep(0)  # what was started after the first task has run
    assert telling.is_set() is tells
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_a_worker_that_is_stopped_ends_its_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefect's worker leaves them: a trainer went on unseen, beside that of the next worker."""
    run = tmp_path / "run"
    script = f"PREFECT__FLOW_RUN_ID=one sleep 300 & echo $! > {run}.part; mv {run}.part {run}; wait"

    @asynccontextmanager
    async def block(*_: object, **__: object) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def worker(*_: object, **__: object) -> AsyncIterator[None]:
        process = await asyncio.create_subprocess_exec("sh", "-c", script)
        while not run.exists():
            await asyncio.sleep(0.02)
        yield
        process.kill()  # as one that did not stop in time
        await process.wait()

    async def done(*_: object) -> None:
        pass

    async def stopped(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(remote_worker, "open_store", block)
    monkeypatch.setattr(remote_worker, "supervised", worker)
    for name in ("create_pools", "until_healthy"):
        monkeypatch.setattr(remote_worker, name, done)
    monkeypatch.setattr(remote_worker, "keep_logs_small", stopped)
    monkeypatch.setattr(remote_worker, "check", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = load_settings(
        home=tmp_path / "home",
        artifact_store=f"file://{tmp_path}/bucket",
        database={"url": "postgresql://x@127.0.0.1/x"},
        prefect={"api_url": "http://127.0.0.1:4200/api"},
    )
    await asyncio.wait_for(RemoteWorker(settings, "gpu").run(), 60)
    left = int(run.read_text())
    assert not (psutil.pid_exists(left) and lives(psutil.Process(left)))


async def test_alerts_whose_block_is_missing_are_set_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    async def set_up(_: Teller) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ServingError("no such block")

    monkeypatch.setattr(teller, "RETRY_S", 0)
    monkeypatch.setattr(Teller, "set_up_alerts", set_up)
    async with aiohttp.ClientSession() as http:
        await Teller(load_settings(), http, PrefectApi(url="http://x/api"))._until_set_up()
    assert len(tries) == 2
