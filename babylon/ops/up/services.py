"""The services of ``babylon up`` and their health checks."""

import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

import babylon
from babylon.core.home import Home, make_directory, make_home, remove_untouched
from babylon.core.processes import Service
from babylon.core.settings import COMPLETE, Settings
from babylon.ops.prefect_env import SERVER, PrefectApi, prefect_api, served_environment
from babylon.serving.serve import READY_S

POOLS = {"cpu": 8, "gpu": 1}  # how many runs at a time
SCRATCH_S = 24 * 3600.0  # no run is that long
_IMPORT_ROOT = Path(babylon.__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpService(Service):
    """A service with a health check, which must pass within ``start_s``.

    ``ports``: each setting of a port with its port. ``pool``: the work pool of a worker.
    """

    healthy: Callable[[aiohttp.ClientSession], Awaitable[bool]]
    ports: Mapping[str, int] = field(default_factory=dict)
    start_s: float = 180.0
    pool: str | None = None

    @property
    def port(self) -> int | None:
        return next(iter(self.ports.values()), None)


def services(settings: Settings) -> list[UpService]:
    """All services, in start order. ``serving`` is first and stops last: it keeps the embedded
    Postgres running, in which Prefect has its database.
    """
    port, logs = settings.prefect.port, settings.home.logs
    api = prefect_api(settings.home, settings.prefect)
    served = environment(settings.home, api, settings.environment())
    service = partial(UpService, environment=served)
    prefect_server = service(
        name=SERVER,
        command=prefect("server", "start", "--host", "127.0.0.1", "--port", str(port)),
        log=logs / f"{SERVER}.log",
        ports={"PREFECT_SERVER_API_PORT": port},
        healthy=_answers(f"{api.url}/health"),
    )
    return [
        service(
            name="serving",
            command=module("babylon", "serve"),
            log=logs / "serving.log",
            ports={
                "LOCAL_ENDPOINT": settings.serving.endpoint_port,
                "ENGINE_PORT": settings.serving.engine_here[1],
                "ADMIN_PORT": settings.serving.admin_port,
            },
            healthy=_answers(
                f"{settings.serving.endpoint.rstrip('/')}/health",
                f"http://127.0.0.1:{settings.serving.admin_port}/health",
            ),
            start_s=READY_S[settings.serving.engine],
        ),
        # Somebody else starts a server that PREFECT_API_URL names.
        *([prefect_server] if api.embedded else []),
        *[worker_service(settings.home, api, pool, pool, served) for pool in POOLS],
    ]


def clear_scratch(home: Home) -> None:
    """Delete what killed runs left. Call it before the workers start: theirs may be old too."""
    remove_untouched(home.scratch, time.time() - SCRATCH_S)


def worker_service(
    home: Home, api: PrefectApi, pool: str, name: str, environment: Mapping[str, str]
) -> UpService:
    """A worker of a pool. ``name`` tells it from the workers of the pool on other machines."""
    # Prefect keeps files of runs in ``/tmp/runner_storage``, and only its first user writes to it.
    make_home(home.root)  # `babylon status` may be the first command of a home
    make_directory(home.scratch)
    return UpService(
        name=f"worker-{name}",
        command=prefect("worker", "start", "--pool", pool, "--name", name),
        log=home.logs / f"worker-{name}.log",
        environment={**environment, "TMPDIR": str(home.scratch)},
        healthy=_worker_online(api, pool, name),
        pool=pool,
    )


def prefect(*arguments: str) -> tuple[str, ...]:
    """A command line of ``prefect`` that keeps its memory small."""
    return module("babylon.cli.prefect_process", *arguments)


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs a module of this Python environment.

    ``-P``: a file in the working directory must not take the place of a module.
    """
    return (sys.executable, "-P", "-m", name, *arguments)


def environment(home: Home, api: PrefectApi, ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of every service: settings, Prefect's API and the import path."""
    ours = own_environment(ours)
    return served_environment(home, api, {**os.environ, **ours})


def own_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The settings ``ours``, in the place of the home's file, and the import path.

    Paths become absolute: a worker runs each flow in a directory of its own.
    """
    paths = {
        name: os.path.abspath(ours[name])
        for name in ("BASE_MODEL", "JUDGE_MODEL_PATH")
        if os.path.exists(ours[name])
    }
    found = filter(None, [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH")])
    return {**ours, **paths, COMPLETE: "1", "PYTHONPATH": os.pathsep.join(found)}


def _answers(*urls: str) -> Callable[[aiohttp.ClientSession], Awaitable[bool]]:
    async def healthy(http: aiohttp.ClientSession) -> bool:
        for url in urls:
            async with http.get(url) as response:
                if response.status != 200:
                    return False
        return True

    return healthy


def _worker_online(
    api: PrefectApi, pool: str, name: str
) -> Callable[[aiohttp.ClientSession], Awaitable[bool]]:
    async def healthy(http: aiohttp.ClientSession) -> bool:
        url = f"{api.url}/work_pools/{pool}/workers/filter"
        async with http.post(url, json={}, headers=api.headers) as response:
            if response.status != 200:
                return False
            workers = await response.json()
        return any(w["name"] == name and w["status"] == "ONLINE" for w in workers)

    return healthy
