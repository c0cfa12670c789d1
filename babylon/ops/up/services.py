"""The services of ``babylon up`` and their health checks."""

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

import babylon
from babylon.core.processes import Service
from babylon.core.settings import Settings
from babylon.ops.prefect_env import SERVER, api_url, served_environment
from babylon.serving.serve import READY_S

POOLS: dict[str, int | None] = {"cpu": None, "gpu": 1}  # how many runs at a time
_IMPORT_ROOT = Path(babylon.__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpService(Service):
    """A service with a health check, which must pass within ``start_s``.

    ``ports`` maps each port to the setting that moves it. ``pool``: the work pool of a worker.
    """

    healthy: Callable[[aiohttp.ClientSession], Awaitable[bool]]
    ports: Mapping[int, str] = field(default_factory=dict)
    start_s: float = 180.0
    pool: str | None = None

    @property
    def port(self) -> int | None:
        return next(iter(self.ports), None)


def services(settings: Settings) -> list[UpService]:
    """All services, in start order. ``serving`` is first and stops last: it keeps the embedded
    Postgres running, in which Prefect has its database.
    """
    port, logs = settings.prefect.port, settings.home.logs
    api = api_url(port)
    service = partial(UpService, environment=environment(settings))
    return [
        service(
            name="serving",
            command=(sys.executable, "-P", "-m", "babylon", "serve"),
            log=logs / "serving.log",
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
        service(
            name=SERVER,
            command=prefect("server", "start", "--host", "127.0.0.1", "--port", str(port)),
            log=logs / f"{SERVER}.log",
            ports={port: "PREFECT_SERVER_API_PORT"},
            healthy=_answers(f"{api}/health"),
        ),
        *[
            service(
                name=f"worker-{pool}",
                command=prefect("worker", "start", "--pool", pool, "--name", pool),
                log=logs / f"worker-{pool}.log",
                healthy=_worker_online(api, pool),
                pool=pool,
            )
            for pool in POOLS
        ],
    ]


def prefect(*arguments: str) -> tuple[str, ...]:
    """A ``prefect`` command line of this Python environment."""
    return (sys.executable, "-P", "-m", "prefect", *arguments)


def environment(settings: Settings) -> dict[str, str]:
    """The environment of every service: settings, Prefect's API, and where ``babylon`` lies.

    Paths become absolute: a worker runs each flow in a directory of its own.
    """
    ours = settings.environment()
    paths = {
        name: os.path.abspath(ours[name])
        for name in ("BASE_MODEL", "JUDGE_MODEL_PATH")
        if os.path.exists(ours[name])
    }
    return {
        **served_environment(settings.home.root, settings.prefect.port, os.environ),
        **ours,
        **paths,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH")])
        ),
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
