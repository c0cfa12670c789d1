"""The supervisor: one process that keeps every service of a home running.

``babylon up`` starts it detached; ``babylon up --foreground`` is it, for systemd or a container. A
service that dies is started again at once, then after pauses that double. The supervisor also hands
windows whose worker died to another one, and counts as a user of the embedded Postgres, so that the
server does not stop with the services that use it.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

import aiohttp

from babylon.core.api_keys import make_prefect_auth
from babylon.core.errors import ServingError
from babylon.core.processes import Processes, Service, supervised
from babylon.core.settings import Settings
from babylon.ops.prefect_env import PrefectApi, prefect_api
from babylon.ops.up.alerts import set_up_alerts
from babylon.ops.up.health import TIMEOUT, until_healthy
from babylon.ops.up.in_force import forget_in_force, write_in_force
from babylon.ops.up.news import tell_news
from babylon.ops.up.prefect_setup import (
    PREFECT_DATABASE,
    create_pools,
    prefect_database,
    set_up_prefect,
)
from babylon.ops.up.services import UpService, environment, own_environment, services
from babylon.ops.up.take_up import take_up_lost
from babylon.stages.train import ensure_champion
from babylon.store import open_store
from babylon.store.server import database_url, kept_running

NAME = "supervisor"
DETACHED = "BABYLON_DETACHED"  # in the environment of a supervisor that ``babylon up`` started
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

    def service(self) -> Service:
        """The supervisor as a service of its own, to be started detached."""
        home = self.settings.home
        return Service(
            name=NAME,
            command=(sys.executable, "-P", "-m", "babylon", "up", "--foreground"),
            log=home.logs / f"{NAME}.log",
            environment=own_environment(self.variables) | {DETACHED: "1"},
        )

    async def run(self) -> None:
        """Start all services and keep them running until SIGINT or SIGTERM, also while they start.

        Raises:
            ServingError: another supervisor of the home runs.
            BabylonError: a service died or did not become healthy at its first start.
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
        api, processes = self._api, Processes(home=settings.home.root)
        other = processes.running(NAME)
        if other is not None and other.pid != os.getpid():
            raise ServingError(
                f"the supervisor of {settings.home.root} runs already, as process {other.pid}:"
                " `babylon down` stops it"
            )
        # systemd starts a supervisor too, and `babylon up`, `status` and `down` must know it.
        processes.record(NAME, os.getpid())
        # Left over from a supervisor that was killed. Their settings may differ, and their ports
        # are needed.
        await stop_all(processes, wanted)
        forget_in_force(settings.home)
        async with (
            kept_running(settings.database, settings.home),
            AsyncExitStack() as stack,
            aiohttp.ClientSession(timeout=TIMEOUT) as http,
        ):
            ours = await self._prepare()

            async def start(group: Sequence[UpService]) -> None:
                for service in group:
                    started = processes.recorder(service.port)
                    await stack.enter_async_context(supervised(service, started, **ours))
                for service in group:
                    await until_healthy(http, processes, service)

            await start([service for service in wanted if service.pool is None])
            await create_pools(http, api)
            await start([service for service in wanted if service.pool])
            await set_up_prefect(http, api, ours)
            await set_up_alerts(http, api, settings.prefect.alerts, settings.windows.minutes)
            write_in_force(settings.home, self.variables)
            log.info("all services answer")
            opening = partial(open_store, settings)
            await asyncio.gather(
                take_up_lost(opening, settings.windows.lease_s, http, api),
                tell_news(opening, settings.windows, http, api),
            )

    async def _prepare(self) -> dict[str, str]:
        """Migrate the database, make the base model, return the environment of the services."""
        settings = self.settings
        async with (
            database_url(settings.database, settings.home) as url,
            open_store(settings, migrate=True) as store,
        ):
            await ensure_champion(store, settings.home, settings.model, settings.seed)
            database = {}
            if self._api.embedded:
                database = {PREFECT_DATABASE: await prefect_database(store, url)}
        return environment(settings.home, self._api, self.variables) | database


async def stop_all(processes: Processes, services: Sequence[UpService]) -> list[str]:
    """Stop the services that run, in reverse order. Return their names."""
    return [
        service.name
        for service in reversed(services)
        if await asyncio.to_thread(processes.stop, service.name)
    ]
