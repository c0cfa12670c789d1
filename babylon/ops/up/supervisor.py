"""The supervisor: one process that keeps every service of a home running.

``babylon up`` starts it detached; ``babylon up --foreground`` is it, for systemd or a container. A
service that dies is started again at once, then after pauses that double. The supervisor also hands
windows whose worker died to another one, and counts as a user of the embedded Postgres, so that the
server does not stop with the services that use it.

A supervisor that is killed leaves its services running. The next one adopts them, so that agents
notice nothing, unless their settings changed. A detached supervisor is started again by a shell.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

import aiohttp

from babylon.core.api_keys import make_prefect_auth
from babylon.core.errors import BabylonError, ServingError
from babylon.core.memory import keep_memory_small
from babylon.core.processes import (
    Processes,
    Service,
    in_background,
    supervised,
)
from babylon.core.settings import Settings
from babylon.ops.prefect_env import SERVER, PrefectApi, prefect_api
from babylon.ops.up.health import long_session, until_healthy
from babylon.ops.up.in_force import (
    changed_settings,
    forget_in_force,
    in_force_path,
    note_problem,
    write_in_force,
)
from babylon.ops.up.prefect_setup import create_pools, prefect_database, set_up_prefect
from babylon.ops.up.services import (
    UpService,
    clear_scratch,
    environment,
    own_environment,
    services,
)
from babylon.ops.up.slots import free_unheld_slots
from babylon.ops.up.take_up import take_up_lost
from babylon.ops.up.teller import RETRY_S, Teller
from babylon.stages.champion import ensure_champion
from babylon.store import Store, open_store
from babylon.store.connection import UNREACHABLE
from babylon.store.server import database_url, kept_running

NAME = "supervisor"
GUARD = "supervisor-guard"
# Starts a supervisor again that did not end in order, once its services ran: $0 is their record.
_GUARD = 'until "$@"; do [ -e "$0" ] || exit 1; sleep 1; done'
DETACHED = "BABYLON_DETACHED"  # in the environment of a supervisor that ``babylon up`` started
_SUPERVISE = (sys.executable, "-P", "-m", "babylon", "up", "--foreground")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The supervisor of the home that ``settings`` name."""

    settings: Settings

    @property
    def variables(self) -> dict[str, str]:
        return self.settings.environment()

    @property
    def _api(self) -> PrefectApi:
        return prefect_api(self.settings.home, self.settings.prefect)

    @property
    def _opening(self) -> Callable[[], AbstractAsyncContextManager[Store]]:
        return partial(open_store, self.settings, game_may_be_away=True)

    def guard(self) -> Service:
        """The supervisor below a shell that guards it, to be started detached."""
        home = self.settings.home
        return Service(
            name=GUARD,
            command=("sh", "-c", _GUARD, str(in_force_path(home)), *_SUPERVISE),
            log=home.logs / f"{NAME}.log",
            environment=own_environment(self.variables) | {DETACHED: "1"},
        )

    async def run(self) -> None:
        """Start all services and keep them running until SIGINT or SIGTERM, also while they start.

        Raises:
            ServingError: another supervisor of the home runs.
            BabylonError: serving or the Prefect server died or did not become healthy at its first
                start.
        """
        keeping = asyncio.create_task(self._keep())

        def stop() -> None:
            if not keeping.cancelling():  # a second signal must not break off the stopping
                keeping.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        with suppress(asyncio.CancelledError):
            await keeping

    async def _keep(self) -> None:
        make_prefect_auth(self.settings.home.root)
        settings, wanted = self.settings, services(self.settings)
        processes = Processes(home=settings.home.root)
        other = processes.running(NAME)
        if other is not None and other.pid != os.getpid():
            raise ServingError(
                f"the supervisor of {settings.home.root} runs already, as process {other.pid}:"
                " `babylon down` stops it"
            )
        # systemd starts a supervisor too, and `babylon up`, `status` and `down` must know it.
        processes.record(NAME, os.getpid())
        # Left over from a supervisor that was killed. With other settings they are stopped, because
        # their ports are needed.
        left = {}
        # They all answered once: a busy machine may now need longer than a first start is given.
        ran = changed_settings(settings.home, self.variables) == []
        if ran:
            left = {one.name: record for one in wanted if (record := processes.running(one.name))}
        else:
            await stop_all(processes, wanted)
            forget_in_force(settings.home)
        if not left:  # files of workers that run may be old too
            await asyncio.to_thread(clear_scratch, settings.home)
        note_problem(settings.home, None)
        async with (
            kept_running(settings.database, settings.home),
            long_session() as http,  # it closes after all that use it have ended
            AsyncExitStack() as stack,
        ):
            log.info("database and base model: made at the first start, which takes minutes")
            ours = await self._prepare()
            await stack.enter_async_context(in_background(keep_memory_small()))

            async def launch(group: Sequence[UpService]) -> None:
                for service in group:
                    recorded = processes.recorder(service.port)
                    running = supervised(service, recorded, left.get(service.name), **ours)
                    await stack.enter_async_context(running)

            servers = [service for service in wanted if service.pool is None]
            workers = [service for service in wanted if service.pool]
            await launch(servers)
            for service in servers:
                answer = partial(until_healthy, http, processes, service)
                await (self._until_done(answer) if ran else answer())
            # The supervisor before may have died while it waited for any of the following.
            taking_up = take_up_lost(self._opening, settings.windows.lease_s, http, self._api)
            await stack.enter_async_context(in_background(taking_up))
            freeing = free_unheld_slots(settings.home.root, http, self._api)
            await stack.enter_async_context(in_background(freeing))
            # Agents are served now. Prefect may be another's: while it is away, we wait for it.
            await self._until_done(partial(create_pools, http, self._api))
            await launch(workers)
            for service in workers:
                await self._until_done(partial(until_healthy, http, processes, service))
            await self._until_done(partial(set_up_prefect, http, self._api, ours))
            await self._watch(http)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Set up alerts and send news, for ever."""
        settings, teller = self.settings, Teller(self.settings, http, self._api)

        async def note_settings() -> None:
            write_in_force(settings.home, self.variables)

        async def alerts() -> None:
            await self._until_done(teller.set_up_alerts)
            await self._until_done(note_settings)
            log.info("all services answer")

        await asyncio.gather(alerts(), teller.tell())

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step until it succeeds, because agents are served meanwhile.

        ``up`` and ``status`` show its problem.
        """
        home = self.settings.home
        while True:
            try:
                await step()
            except (*UNREACHABLE, BabylonError) as error:
                log.warning("%s; tried again in %.0f s", error, RETRY_S)
                note_problem(home, str(error))
                with suppress(OSError):
                    write_in_force(home, self.variables)  # `up` need not wait for it
                await asyncio.sleep(RETRY_S)
            else:
                note_problem(home, None)
                return

    async def _prepare(self) -> dict[str, str]:
        """Migrate the database, make the base model, return the environment of the services."""
        settings = self.settings
        async with (
            database_url(settings.database, settings.home) as url,
            # The gateway needs only our own database, also after a reboot.
            open_store(settings, migrate=True, game_may_be_away=True) as store,
        ):
            await ensure_champion(store, settings.home, settings.model, settings.seed)
            database: dict[str, str] = {}
            if self._api.embedded:
                database = await prefect_database(store, url)
        return environment(settings.home, self._api, self.variables) | database


async def stop_all(processes: Processes, services: Sequence[UpService]) -> list[str]:
    """Stop the services that run, in reverse order. Return their names."""
    return [name for name in stop_order(services) if await asyncio.to_thread(processes.stop, name)]


def stop_order(services: Sequence[UpService]) -> list[str]:
    """Return the names of all services that may run, the last one first.

    A Prefect server of earlier settings is among them: PREFECT_API_URL may name another one now.
    """
    names = [service.name for service in reversed(services)]
    return names if SERVER in names else [SERVER, *names]
