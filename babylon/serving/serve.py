"""Serving: engine and gateway as supervised processes on loopback. ``babylon serve`` adds the
admin API.

The engine holds the weights and may crash. The gateway holds the clients' connections and records
every answer; it is one process or several. Each restarts without the others.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import aiohttp

from babylon.core.api_keys import local_key_path
from babylon.core.errors import ConfigError, ServingError
from babylon.core.home import Home, make_home
from babylon.core.processes import (
    Service,
    Supervised,
    all_supervised,
    in_background,
    keep_logs_small,
    supervised,
)
from babylon.core.settings import ServingSettings, Settings
from babylon.serving.gateway.workers import Worker
from babylon.serving.ports import wait_for_port
from babylon.serving.vllm.command import require_vllm
from babylon.store.server import kept_running

logger = logging.getLogger(__name__)

# vLLM compiles, and reads many gigabytes.
READY_S = {"embedded": 180.0, "vllm": 1800.0, "remote": 180.0}
_POLL_S = 0.1
_ASK_S = 2.0  # a process that starts lets its callers wait at its control address


@dataclass(frozen=True, slots=True)
class Serving:
    """The running processes. ``url`` is the base URL for an OpenAI client."""

    url: str
    engine: Supervised | None
    gateways: Sequence[Supervised]


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
    """Run engine and gateway while the block runs. The block begins when all are ready.

    The gateway is also ready when there is no policy yet; it waits for the first route.

    Raises:
        ConfigError: The settings name no engine that can be started.
        ServingError: A port is busy, or a process does not start.
    """
    make_home(home.root)
    await wait_for_port(given.endpoint_port, user="the gateway", variable="LOCAL_ENDPOINT")
    if given.listen and (port := urlsplit(given.listen).port):  # SO_REUSEPORT would share it
        await wait_for_port(port, user="the gateway", variable="GATEWAY_LISTEN")
    async with AsyncExitStack() as stack:
        engine = None
        if given.engine != "remote":
            engine = await stack.enter_async_context(
                supervised(await engine_service(given, home, environment))
            )
        gateways, ports = await stack.enter_async_context(
            gateway_processes(given, home, environment)
        )
        await _wait_until_ready(given, home, (engine, *gateways) if engine else gateways, ports)
        yield Serving(f"{given.endpoint.rstrip('/')}/v1", engine, gateways)


async def serve_engine(given: ServingSettings, home: Home, environment: dict[str, str]) -> None:
    """Run an engine alone, for gateways on other machines, until SIGINT or SIGTERM.

    Raises:
        ConfigError: vLLM is to listen to other machines.
        ServingError: A port is busy, or the process does not start.
    """
    if given.engine == "vllm" and given.engine_listen:
        raise ConfigError(
            f"ENGINE_LISTEN={given.engine_listen}: vLLM servers that babylon starts listen on"
            " loopback: unset ENGINE_LISTEN and run the gateway on this machine, or use the"
            " embedded engine"
        )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    make_home(home.root)
    engine = await engine_service(given, home, environment)
    async with supervised(engine), in_background(keep_logs_small(home.logs)):
        here = given.engine_listen or f"http://127.0.0.1:{given.engine_port}"
        logger.info("the engine listens at %s", here)
        await stop.wait()


async def engine_service(
    given: ServingSettings, home: Home, environment: dict[str, str]
) -> Service:
    """The process of the engine that the settings name.

    Raises:
        ConfigError: They name none, or one that cannot be started.
        ServingError: Its port is busy.
    """
    port = given.engine_here[1]
    named = "ENGINE_PORT" if port == given.engine_port else "ENGINE_LISTEN"
    await wait_for_port(port, user="the engine", variable=named)
    if given.engine == "vllm":
        require_vllm(given)
        return _service("engine", "babylon.serving.vllm.vllm_host", home, environment)
    return _torch_engine(given, home)


@asynccontextmanager
async def gateway_processes(
    given: ServingSettings, home: Home, environment: dict[str, str]
) -> AsyncIterator[tuple[Sequence[Supervised], list[int]]]:
    """Run the processes of the gateway while the block runs.

    Yields:
        The processes, and the port at which each can be asked.

    Raises:
        ConfigError: Several processes are asked for, and deployments of other machines.
    """
    module = "babylon.serving.gateway.gateway_process"
    if given.workers == 1:
        async with supervised(_service("gateway", module, home, environment)) as gateway:
            yield (gateway,), [given.endpoint_port]
        return
    if given.address:
        raise ConfigError(
            f"GATEWAY_WORKERS={given.workers}: GATEWAY_ADDRESS={given.address} names one process:"
            " leave one of the two out; on several machines, start more gateways"
        )
    with ExitStack() as stack:  # the sockets outlive a process, so its callers wait for the next
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(given.workers)
        ]
        ports = [one.getsockname()[1] for one in sockets]
        services = []
        for number, one in enumerate(sockets, 1):
            worker = Worker(number=number, control=one.fileno(), ports=tuple(ports))
            service = _service(f"gateway-{number}", module, home, environment, *worker.options)
            services.append(replace(service, descriptors=[worker.control]))
        async with all_supervised(services) as gateways:
            yield gateways, ports


def _service(
    name: str, module: str, home: Home, environment: dict[str, str], *options: str
) -> Service:
    return Service(
        name=name,
        # -P: a file in the working directory must not take the place of a module.
        command=[sys.executable, "-P", "-m", module, *options],
        environment=environment,
        log=home.logs / f"{name.partition(' ')[0]}.log",
    )


def _torch_engine(given: ServingSettings, home: Home) -> Service:
    """The embedded engine. It leaves one core to the connections: when its threads spin on all of
    them, a small model samples half as fast on two cores as with one thread.
    """
    threads = max(1, (os.cpu_count() or 1) - 1)
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    module = "babylon.serving.engine.engine_process"
    options = [f"--port={given.engine_port}", f"--home={home.root}"]
    if given.engine_listen:
        url = urlsplit(given.engine_listen)
        options = [f"--host={url.hostname}", f"--port={url.port}", f"--home={home.root}"]
    if home.store:
        options += [f"--store={home.store}", f"--cache-gb={home.cache_gb:g}"]
    return _service("engine", module, home, environment, *options)


async def _wait_until_ready(
    serving: ServingSettings, home: Home, processes: Sequence[Supervised], ports: Sequence[int]
) -> None:
    """Wait until the engine answers, and each gateway process serves its route or has none."""
    ready_s = READY_S[serving.engine]
    deadline = time.monotonic() + ready_s  # a round takes up to _ASK_S, so rounds tell no time
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ASK_S)) as session:
        while True:
            for process in processes:
                if failure := process.failure():
                    raise ServingError(failure)
            engine = "ok"
            if serving.engine != "remote":
                engine = await _health(session, *serving.engine_here)
            gateways = await asyncio.gather(
                *(_health(session, "127.0.0.1", port) for port in ports)
            )
            if engine == "ok" and {*gateways} <= {"ok", "no policy"}:
                return
            if time.monotonic() >= deadline:
                raise ServingError(
                    f"serving is not ready after {ready_s:.0f} s: engine: {engine}, gateway:"
                    f" {', '.join(gateways)}; see the logs in {home.logs}"
                )
            await asyncio.sleep(_POLL_S)


async def _health(session: aiohttp.ClientSession, host: str, port: int) -> str:
    try:
        async with session.get(f"http://{host}:{port}/health") as response:
            return str((await response.json())["status"])
    except (aiohttp.ClientConnectionError, TimeoutError):
        return "does not answer"
