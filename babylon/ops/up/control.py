"""Start, stop and look at the services of one home."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from babylon.core.errors import BabylonError, ServingError
from babylon.core.settings import Settings
from babylon.ops.up.bootstrap import bootstrap, create_pools
from babylon.ops.up.processes import Processes
from babylon.ops.up.services import ROOT, SERVER, Service, environment, services
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
    """Migrate the database, start what is not running, and return when all of it answers.

    The first time the base model is made or found too (``progress``). When something fails, what
    this call started is stopped again.

    Raises:
        ServingError: a port is taken, a service died or did not get well in time.
        DatabaseError: the database is down.
    """
    processes = Processes(home=settings.home.root)
    with processes.exclusive():
        missing = [s for s in services(settings) if processes.running(s.name) is None]
        for service in missing:
            for port, variable in service.ports.items():
                require_free_port(port, user=service.name, variable=variable)
        async with open_store(settings, migrate=True) as store:
            await ensure_champion(store, settings, progress=progress)
            try:
                await _start(settings, processes, missing)
            except BaseException:  # a signal too: nothing half-started is left
                for service in reversed(missing):
                    await asyncio.to_thread(processes.stop, service.name)
                raise
    return await status(settings)


async def down(settings: Settings) -> list[str]:
    """Stop what ``up`` started, the last first; returns the names of what ran."""
    processes = Processes(home=settings.home.root)
    with processes.exclusive():
        stopped = [
            service.name
            for service in reversed(services(settings))
            if await asyncio.to_thread(processes.stop, service.name)
        ]
        if stopped:
            async with database_url(settings.database, settings.home):
                pass  # the last user to leave stops the embedded server, even after a SIGKILL
        return stopped


async def status(settings: Settings) -> list[ServiceStatus]:
    """Database first, then each service."""
    processes = Processes(home=settings.home.root)
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        found = [await _status(http, processes, service) for service in services(settings)]
    serving = any(one.running for one in found)
    return [await _database(settings, serving), *found]


async def _start(settings: Settings, processes: Processes, missing: list[Service]) -> None:
    inherited = environment(settings)
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:

        async def start(group: list[Service]) -> None:
            for service in group:
                processes.start(
                    service.name,
                    service.argv,
                    environment=inherited,
                    port=service.port,
                    directory=ROOT,
                )
            for service in group:
                await _until_healthy(http, processes, service)

        await start([service for service in missing if service.name == SERVER])
        await create_pools(settings, http)
        await start([service for service in missing if service.name != SERVER])
        await bootstrap(settings, http)


async def _until_healthy(
    http: aiohttp.ClientSession, processes: Processes, service: Service
) -> None:
    deadline = time.monotonic() + service.start_s
    while not await _is_healthy(http, service):
        died = processes.running(service.name) is None
        if died or time.monotonic() > deadline:
            what = "died" if died else f"did not answer within {service.start_s:.0f} s"
            raise ServingError(
                f"{service.name} {what}; the end of {processes.log(service.name)}:\n"
                f"{processes.log_tail(service.name)}"
            )
        await asyncio.sleep(_POLL_S)


async def _is_healthy(http: aiohttp.ClientSession, service: Service) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError):
        return await service.healthy(http)
    return False


async def _status(
    http: aiohttp.ClientSession, processes: Processes, service: Service
) -> ServiceStatus:
    record = processes.running(service.name)
    return ServiceStatus(
        name=service.name,
        running=record is not None,
        healthy=record is not None and await _is_healthy(http, service),
        pid=record.pid if record else None,
        ports=tuple(service.ports),
        detail=str(processes.log(service.name)),
    )


async def _database(settings: Settings, serving: bool) -> ServiceStatus:
    """Does not start an embedded server only to say that it runs."""
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
