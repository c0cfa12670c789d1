"""Serving: engine and gateway as two supervised processes on loopback. ``babylon serve`` adds the
admin API as a third.

The engine holds the weights and may crash. The gateway holds the clients' connections and records
every answer. Each restarts without the other.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from babylon.core.api_keys import local_key_path
from babylon.core.errors import ServingError
from babylon.core.home import Home
from babylon.core.processes import Service, Supervised, in_background, keep_logs_small, supervised
from babylon.core.settings import ServingSettings, Settings
from babylon.serving.ports import wait_for_port
from babylon.serving.vllm.command import require_vllm
from babylon.store.server import kept_running

logger = logging.getLogger(__name__)

READY_S = {"embedded": 180.0, "vllm": 1800.0}  # vLLM compiles, and reads many gigabytes
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Serving:
    """The running processes. ``url`` is the base URL for an OpenAI client."""

    url: str
    engine: Supervised
    gateway: Supervised


async def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ServingError: A port is busy, or a process does not start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    home, port = settings.home, settings.serving.admin_port
    await wait_for_port(port, user="the admin API", variable="ADMIN_PORT")
    environment = settings.environment()
    admin = _service("admin API", "babylon.ops.admin_process", home, environment)
    async with (
        serving(settings.serving, home, environment) as running,
        kept_running(settings.database, home),
        supervised(admin),
        in_background(keep_logs_small(home.logs)),
    ):
        key = local_key_path(home.root)
        logger.info("agents call %s with the key in %s; logs: %s", running.url, key, home.logs)
        await stop.wait()


@asynccontextmanager
async def serving(
    given: ServingSettings, home: Home, environment: dict[str, str]
) -> AsyncIterator[Serving]:
    """Run engine and gateway while the block runs. The block begins when they are ready.

    The gateway is also ready when there is no policy yet; it waits for the first route.

    Raises:
        ConfigError: The settings name no engine that can be started.
        ServingError: A port is busy, or a process does not start.
    """
    await wait_for_port(given.engine_port, user="the engine", variable="ENGINE_PORT")
    await wait_for_port(given.endpoint_port, user="the gateway", variable="LOCAL_ENDPOINT")
    if given.engine == "vllm":
        require_vllm(given)
        engine = _service("engine", "babylon.serving.vllm.vllm_host", home, environment)
    else:
        engine = _torch_engine(given.engine_port, home)
    gateway = _service("gateway", "babylon.serving.gateway.gateway_process", home, environment)
    async with supervised(engine) as running_engine, supervised(gateway) as running_gateway:
        await _wait_until_ready(given, home, (running_engine, running_gateway))
        yield Serving(f"{given.endpoint.rstrip('/')}/v1", running_engine, running_gateway)


def _service(
    name: str, module: str, home: Home, environment: dict[str, str], *options: str
) -> Service:
    return Service(
        name=name,
        command=[sys.executable, "-m", module, *options],
        environment=environment,
        log=home.logs / f"{name.partition(' ')[0]}.log",
    )


def _torch_engine(port: int, home: Home) -> Service:
    """The embedded engine. It leaves one core to the connections: when its threads spin on all of
    them, a small model samples half as fast on two cores as with one thread.
    """
    threads = max(1, (os.cpu_count() or 1) - 1)
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    module = "babylon.serving.engine.engine_process"
    return _service("engine", module, home, environment, f"--port={port}", f"--home={home.root}")


async def _wait_until_ready(
    serving: ServingSettings, home: Home, processes: tuple[Supervised, ...]
) -> None:
    """Wait until the engine answers, and the gateway serves its route or has none."""
    ready_s = READY_S[serving.engine]
    async with aiohttp.ClientSession() as session:
        for _ in range(round(ready_s / _POLL_S)):
            for process in processes:
                if failure := process.failure():
                    raise ServingError(failure)
            engine = await _health(session, serving.engine_port)
            gateway = await _health(session, serving.endpoint_port)
            if engine == "ok" and gateway in ("ok", "no policy"):
                return
            await asyncio.sleep(_POLL_S)
    raise ServingError(
        f"serving is not ready after {ready_s:.0f} s: engine: {engine}, gateway: {gateway};"
        f" see the logs in {home.logs}"
    )


async def _health(session: aiohttp.ClientSession, port: int) -> str:
    try:
        async with session.get(f"http://127.0.0.1:{port}/health") as response:
            return str((await response.json())["status"])
    except aiohttp.ClientConnectionError:
        return "does not answer"
