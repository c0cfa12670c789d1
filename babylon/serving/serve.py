"""Serving: the engine and the gateway as two supervised processes on loopback, and under `babylon
serve` the admin API as a third.

The engine holds the weights and may die of them; the gateway holds the clients' connections and
the record of what was answered. Either is started again without the other.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from babylon.core.api_keys import local_key_path
from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.serving.ports import require_free_port
from babylon.serving.supervise import Service, Supervised, supervised
from babylon.serving.vllm.command import require_vllm
from babylon.store.revival import kept_running

logger = logging.getLogger(__name__)

READY_S = {"embedded": 180.0, "vllm": 1800.0}  # vLLM compiles, and reads many gigabytes
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs. ``url`` is the base URL for an OpenAI client."""

    url: str
    engine: Supervised
    gateway: Supervised


async def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ServingError: a port is busy, or a process does not start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    require_free_port(settings.serving.admin_port, user="the admin API", variable="ADMIN_PORT")
    async with (
        serving(settings) as running,
        kept_running(settings),
        supervised(_admin(settings)),
    ):
        key = local_key_path(settings.home.root)
        logger.info(
            "agents call %s with the key in %s; logs: %s", running.url, key, settings.home.logs
        )
        await stop.wait()


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Serving]:
    """Engine and gateway run while the block runs; it begins when they are ready to serve.

    Without any policy the gateway is ready too: it waits for the first route.

    Raises:
        ConfigError: the settings name no engine that could be started.
        ServingError: a port is busy, or a process does not start.
    """
    require_free_port(settings.serving.engine_port, user="the engine", variable="ENGINE_PORT")
    require_free_port(settings.serving.endpoint_port, user="the gateway", variable="LOCAL_ENDPOINT")
    async with (
        supervised(_engine(settings)) as engine,
        supervised(_gateway(settings)) as gateway,
    ):
        async with aiohttp.ClientSession() as session:
            await _wait_until_ready(session, settings, (engine, gateway))
        yield Serving(f"{settings.serving.endpoint.rstrip('/')}/v1", engine, gateway)


def _engine(settings: Settings) -> Service:
    """The torch engine, or the host of vLLM servers in its place.

    Raises:
        ConfigError: the settings name no vLLM.
    """
    if settings.serving.engine == "vllm":
        require_vllm(settings)
        command, environment = ["babylon.serving.vllm.vllm_host"], settings.environment()
    else:
        command = [
            "babylon.serving.engine.engine_process",
            f"--port={settings.serving.engine_port}",
        ]
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads()))}
    return Service(
        name="engine",
        command=[sys.executable, "-m", *command],
        environment=environment,
        log=settings.home.logs / "engine.log",
    )


def _threads() -> int:
    """The connections need a core, too: beside threads that spin on all of them, a small model
    samples half as fast on two cores as with one thread."""
    return max(1, (os.cpu_count() or 1) - 1)


def _gateway(settings: Settings) -> Service:
    return Service(
        name="gateway",
        command=[sys.executable, "-m", "babylon.serving.gateway.gateway_process"],
        environment=settings.environment(),
        log=settings.home.logs / "gateway.log",
    )


def _admin(settings: Settings) -> Service:
    return Service(
        name="admin API",
        command=[sys.executable, "-m", "babylon.deployment.admin"],
        environment=settings.environment(),
        log=settings.home.logs / "admin.log",
    )


async def _wait_until_ready(
    session: aiohttp.ClientSession, settings: Settings, processes: tuple[Supervised, ...]
) -> None:
    """Both answer, and the gateway serves its route or says that there is none yet."""
    ready_s = READY_S[settings.serving.engine]
    for _ in range(round(ready_s / _POLL_S)):
        for process in processes:
            if failure := process.failure():
                raise ServingError(failure)
        engine = await _health(session, settings.serving.engine_port)
        gateway = await _health(session, settings.serving.endpoint_port)
        if engine["status"] == "ok" and gateway["status"] in ("ok", "no policy"):
            return
        await asyncio.sleep(_POLL_S)
    raise ServingError(
        f"serving is not ready after {ready_s:.0f} s: engine {engine}, gateway {gateway};"
        f" see the logs in {settings.home.logs}"
    )


async def _health(session: aiohttp.ClientSession, port: int) -> dict[str, Any]:
    try:
        async with session.get(f"http://127.0.0.1:{port}/health") as response:
            health: dict[str, Any] = await response.json()
            return health
    except aiohttp.ClientConnectionError:
        return {"status": "does not answer"}
