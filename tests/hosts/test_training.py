"""Workers on machines of their own: the one that trains dies, and another takes the window up."""

import asyncio
import os
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from babylon.core.failpoints import VARIABLE
from babylon.core.objects import exists, names
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import DONE
from babylon.ops.prefect_env import RESULTS_BLOCK
from babylon.policies.shared_files import publish_checkpoint
from babylon.store import Store, open_store
from babylon.store.policies import ensure_base, list_policies
from babylon.store.windows import get_window
from tests.faults.world import WINDOW, play
from tests.hosts.machines import (
    PREFECT_PORT,
    Machine,
    machines,
    start_object_store,
    start_postgres,
)
from tests.tiny_policy import save_tiny_policy

pytestmark = pytest.mark.skipif("HOSTS" not in os.environ, reason="takes minutes: `make hosts`")
PATIENCE_S = 1500.0
AUTH = "babylon:s3cret"
TRAINING = {
    "SCORER": "heuristic",
    "MIN_ACTIONS_PER_TRAJECTORY": "1",
    "ITERATIONS": "3",
    "LEARNING_RATE": "1e-4",
    "ARENA_SCENARIOS": "32",
}


@dataclass
class Farm:
    """Database and object store on one machine, Prefect on another, and machines that work."""

    hosts: dict[str, Machine]
    settings: Settings
    store: Store
    api: str
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        for _ in range(60):
            async with self.http.request(method, f"{self.api}/{path}", json=body) as answer:
                if answer.status != 503:
                    assert answer.status < 400, await answer.text()
                    return await answer.json()
            await asyncio.sleep(1)  # its database is busy
        raise AssertionError(f"Prefect is too busy for {path}")

    async def work(self, name: str, pool: str, **environment: str) -> None:
        """Start a worker by the one command, and wait until it works."""
        host = self.hosts[name]
        log = host.babylon("worker", "--pool", pool, "--url", self.api, **environment)
        await self.until(lambda: "works on the pool" in log.read_text(), name)

    async def until(self, done: Callable[[], object], name: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(done):
                assert self.hosts[name].running[-1].poll() is None, self.hosts[name].logs()
                await asyncio.sleep(0.5)


@pytest.fixture
async def farm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Farm]:
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as directory,
        machines(Path(directory), "store", "prefect", "cpu", "gpu", "spare") as hosts,
    ):
        url = await asyncio.to_thread(start_postgres, hosts["store"])
        shared = await asyncio.to_thread(start_object_store, hosts["store"])
        for name, value in shared.items():
            monkeypatch.setenv(name, value)
        api = f"http://{hosts['prefect'].address}:{PREFECT_PORT}/api"
        await _start_prefect(hosts["prefect"], url)
        own = {**shared, **TRAINING, "DATABASE_URL": url, "PREFECT_API_AUTH_STRING": AUTH}
        for one in hosts.values():
            one.environment = {**own, "BABYLON_HOME": str(one.home), "OMP_NUM_THREADS": "1"}
        settings = load_settings(database={"url": url}, home=Path(directory) / "operator")
        header = {"Authorization": f"Basic {b64encode(AUTH.encode()).decode()}"}
        async with (
            open_store(settings, migrate=True) as store,
            aiohttp.ClientSession(headers=header) as http,
        ):
            base = str(save_tiny_policy(settings.home.models / "tiny", seed=0))
            digest = await asyncio.to_thread(publish_checkpoint, settings.home, base)
            await ensure_base(store, uri=base, base_model="tiny", digest=digest)
            await play(store, Path(base))
            await _until_answers(http, api, hosts["prefect"])
            yield Farm(hosts, settings, store, api, http)


async def _start_prefect(host: Machine, url: str) -> None:
    """Start a server on this machine, with a database of its own beside ours."""
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE DATABASE prefect")
    await connection.close()
    database = url.replace("postgresql:", "postgresql+asyncpg:").rpartition("/")[0] + "/prefect"
    host.start(
        *(sys.executable, "-P", "-m", "prefect", "server", "start"),
        *("--host", host.address, "--port", str(PREFECT_PORT)),
        PREFECT_HOME=str(host.disk / "prefect"),
        PREFECT_SERVER_DATABASE_CONNECTION_URL=database,
        PREFECT_SERVER_API_AUTH_STRING=AUTH,
        PREFECT_API_AUTH_STRING=AUTH,
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
    )


async def _until_answers(http: aiohttp.ClientSession, api: str, host: Machine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{api}/health") as answer:
                    if answer.status == 200:
                        return
            assert host.running[-1].poll() is None, host.logs()
            await asyncio.sleep(0.5)


async def test_a_window_is_trained_by_machines_that_share_no_file_though_one_dies(
    farm: Farm,
) -> None:
    await farm.work("cpu", "cpu")
    await farm.work("gpu", "gpu", **{VARIABLE: "progress.after"})  # it dies after its first save
    named = await farm.ask("GET", "deployments/name/train-window/one-window")
    assert not named.get("path") and not named.get("pull_steps")
    parameters = {"window_id": WINDOW.id, "placement": "deployed"}
    run = {"parameters": parameters, "idempotency_key": "once"}
    parent = await farm.ask("POST", f"deployments/{named['id']}/create_flow_run", run)
    home = farm.settings.home
    await farm.until(lambda: names(home, home.progress), "gpu")
    await farm.until(lambda: _saved(farm), "gpu")
    await _crashed(farm)
    farm.hosts["gpu"].kill()
    await farm.work("spare", "gpu")
    state = await _final(farm, parent["id"])
    logs = await _logs(farm)
    assert state["type"] == "COMPLETED", "\n".join([str(state), *logs[-60:]])
    assert [line for line in logs if "the update resumes from" in line], "\n".join(logs[-80:])
    row = await get_window(farm.store, WINDOW.id)
    assert row is not None and row.state in DONE
    policies = await list_policies(farm.store)
    assert [one.window_id for one in policies] == [None, WINDOW.id]
    counted = await farm.store.pool.fetchrow(
        "SELECT count(*) AS n, count(DISTINCT trajectory_id) AS single FROM babylon.trained"
    )
    assert counted is not None and counted["n"] == counted["single"] > 0
    references = await farm.store.pool.fetch("SELECT uri FROM babylon.policies")
    assert all(one["uri"].startswith("home:") for one in references)
    assert row.scored is not None
    assert exists(home, Path(home.resolve(row.scored.artifact.uri)))
    assert not names(home, home.progress)  # what was taken up is gone
    assert RESULTS_BLOCK.startswith("babylon-results/")


def _saved(farm: Farm) -> bool:
    home = farm.settings.home
    return any(names(home, one) for one in names(home, home.progress))


async def _crashed(farm: Farm) -> None:
    """Wait until Prefect knows that the run on the first GPU is lost."""
    asked = {"flow_runs": {"state": {"type": {"any_": ["CRASHED"]}}}}
    async with asyncio.timeout(PATIENCE_S):
        while not await farm.ask("POST", "flow_runs/filter", asked):
            await asyncio.sleep(0.5)


async def _final(farm: Farm, run: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state: dict[str, Any] = (await farm.ask("GET", f"flow_runs/{run}"))["state"]
        if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return state
        await asyncio.sleep(1)
    raise AssertionError("\n".join(one.logs() for one in farm.hosts.values()))


async def _logs(farm: Farm) -> list[str]:
    found = await farm.ask("POST", "logs/filter", {"limit": 200, "sort": "TIMESTAMP_ASC"})
    return [str(one["message"]) for one in found]
