"""What runs under ``babylon up``, and how each service shows that it is well."""

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

import babylon
from babylon.core.settings import Settings
from babylon.ops.prefect_env import api_url, served_environment
from babylon.serving.serve import READY_S

ROOT = Path(babylon.__file__).parents[1]
POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}  # how many runs at a time
SERVER = "prefect-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process, the ports it takes (with the variable that moves each), its sign of health, and
    how long that may be in coming."""

    name: str
    argv: tuple[str, ...]
    ports: dict[int, str]
    healthy: Callable[[aiohttp.ClientSession], Awaitable[bool]]
    start_s: float = 180.0

    @property
    def port(self) -> int | None:
        return next(iter(self.ports), None)


def services(settings: Settings) -> list[Service]:
    """In the order in which they are started."""
    port = settings.prefect.port
    api = api_url(port)
    return [
        Service(
            name=SERVER,
            argv=prefect(
                *("server", "start", "--host", "127.0.0.1", "--port", str(port)),
                # Prefect's, with an SQLite that does not fail
                module="babylon.flows.prefect_server",
            ),
            ports={port: "PREFECT_SERVER_API_PORT"},
            healthy=_answers(f"{api}/health"),
        ),
        *[
            Service(
                name=f"worker-{pool}",
                argv=prefect("worker", "start", "--pool", pool, "--name", pool),
                ports={},
                healthy=_worker_online(api, pool),
            )
            for pool in POOLS
        ],
        Service(
            name="serving",
            argv=(sys.executable, "-P", "-m", "babylon", "serve"),
            ports={
                settings.serving.endpoint_port: "LOCAL_ENDPOINT",
                settings.serving.engine_port: "ENGINE_PORT",
                settings.serving.admin_port: "ADMIN_PORT",
            },
            healthy=_answers(
                f"{settings.serving.endpoint.rstrip('/')}/health",
                f"http://127.0.0.1:{settings.serving.admin_port}/health",
            ),
            start_s=READY_S[settings.serving.engine],
        ),
    ]


def prefect(*arguments: str, module: str = "prefect") -> tuple[str, ...]:
    """The ``prefect`` command of this very environment."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment(settings: Settings) -> dict[str, str]:
    """What every service inherits: our settings, Prefect's API, this checkout's packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **served_environment(settings.home.root, settings.prefect.port, os.environ),
        **settings.environment(),
        "PYTHONPATH": path,
    }


def _answers(*urls: str) -> Callable[[aiohttp.ClientSession], Awaitable[bool]]:
    async def healthy(http: aiohttp.ClientSession) -> bool:
        for url in urls:
            async with http.get(url) as response:
                if response.status != 200:
                    return False
        return True

    return healthy


def _worker_online(api: str, pool: str) -> Callable[[aiohttp.ClientSession], Awaitable[bool]]:
    async def healthy(http: aiohttp.ClientSession) -> bool:
        async with http.post(f"{api}/work_pools/{pool}/workers/filter", json={}) as response:
            if response.status != 200:
                return False
            workers = await response.json()
        return any(w["name"] == pool and w["status"] == "ONLINE" for w in workers)

    return healthy
