"""Start, stop and report the services of one home."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from babylon.core.errors import BabylonError, ServingError
from babylon.core.processes import Processes
from babylon.core.settings import Settings
from babylon.ops.prefect_env import api_url
from babylon.ops.up.prefect_setup import (
    PREFECT_DATABASE,
    create_pools,
    prefect_database,
    set_up_prefect,
)
from babylon.ops.up.services import UpService, environment, services
from babylon.serving.ports import require_free_port
from babylon.stages.train import ensure_champion
from babylon.store import database_status, open_store
from babylon.store.server import database_url
from babylon.training.backends.train_input import Progress

_POLL_S = 0.5
_TIMEOUT = aiohttp.ClientTimeout(total=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One line of ``babylon status``."""

    name: str
    running: bool
    healthy: bool
    pid: int | None = None
    ports: tuple[int, ...] = ()
    detail: str = ""


async def up(settings: Settings, progress: Progress | None = None) -> list[ServiceStatus]:
    """Migrate the database, start what is not running, and return when everything answers.

    The first call also makes the base model or finds it; ``progress`` reports that. When a service
    fails, the services that this call started are stopped.

    Raises:
        ServingError: a port is taken, or a service died or did not become healthy in time.
        DatabaseError: the database is down.
    """
    processes = Processes(home=settings.home.root)
    with processes.exclusive():
        missing = [s for s in services(settings) if processes.running(s.name) is None]
        for service in missing:
            for port, variable in service.ports.items():
                require_free_port(port, user=service.name, variable=variable)
        async with (
            database_url(settings.database, settings.home) as url,
            open_store(settings, migrate=True) as store,
        ):
            await ensure_champion(store, settings, progress=progress)
            database = {PREFECT_DATABASE: await prefect_database(store, url)}
            api = api_url(settings.prefect.port)
            try:
                await _start(processes, missing, api, environment(settings) | database)
            except BaseException:  # Ctrl-C too must leave nothing half-started
                for service in reversed(missing):
                    await asyncio.to_thread(processes.stop, service.name)
                raise
    return await status(settings)


async def down(settings: Settings) -> list[str]:
    """Stop what ``up`` started, in reverse order. Return the names of the services that ran."""
    processes = Processes(home=settings.home.root)
    with processes.exclusive():
        stopped = [
            service.name
            for service in reversed(services(settings))
            if await asyncio.to_thread(processes.stop, service.name)
        ]
        if stopped:
            async with database_url(settings.database, settings.home):
                pass  # the last user stops the embedded server; killed services did not
        return stopped


async def status(settings: Settings) -> list[ServiceStatus]:
    """The state of the database and of each service."""
    processes = Processes(home=settings.home.root)
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        found = [await _status(http, processes, service) for service in services(settings)]
    serving = any(one.running for one in found)
    return [await _database(settings, serving), *found]


async def _start(
    processes: Processes, missing: list[UpService], api: str, environment: dict[str, str]
) -> None:
    """Start the missing services and set Prefect up: its server, then pools, then workers."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:

        async def start(group: list[UpService]) -> None:
            for service in group:
                processes.start(service, port=service.port, **environment)
            for service in group:
                await _until_healthy(http, processes, service)

        await start([service for service in missing if service.pool is None])
        await create_pools(http, api)
        await start([service for service in missing if service.pool])
        await set_up_prefect(http, api, environment)


async def _until_healthy(
    http: aiohttp.ClientSession, processes: Processes, service: UpService
) -> None:
    deadline = time.monotonic() + service.start_s
    while not await _is_healthy(http, service):
        died = processes.running(service.name) is None
        if died or time.monotonic() > deadline:
            what = "died" if died else f"did not answer within {service.start_s:.0f} s"
            raise ServingError(
                f"{service.name} {what}; the end of {service.log}:\n{service.log_tail()}"
            )
        await asyncio.sleep(_POLL_S)


async def _is_healthy(http: aiohttp.ClientSession, service: UpService) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError):
        return await service.healthy(http)
    return False


async def _status(
    http: aiohttp.ClientSession, processes: Processes, service: UpService
) -> ServiceStatus:
    record = processes.running(service.name)
    return ServiceStatus(
        name=service.name,
        running=record is not None,
        healthy=record is not None and await _is_healthy(http, service),
        pid=record.pid if record else None,
        ports=tuple(service.ports),
        detail=str(service.log),
    )


async def _database(settings: Settings, serving: bool) -> ServiceStatus:
    """The database's state. An embedded server that is down is not started for it."""
    if settings.database.url is None and not serving:
        return ServiceStatus(name="database", running=False, healthy=False, detail="embedded")
    try:
        found = await database_status(settings)
    except BabylonError as error:
        return ServiceStatus(name="database", running=False, healthy=False, detail=str(error))
    return ServiceStatus(
        name="database",
        running=True,
        healthy=found.revision == found.head,
        detail=found.place,
    )
