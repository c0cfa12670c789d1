"""A worker on a machine of its own: ``babylon worker --pool gpu --url https://prefect/api``.

The machine shares the database, the object store and Prefect's API with the others, and no disk.
"""

import asyncio
import logging
import os
import platform
import signal
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

from babylon.core.errors import ConfigError
from babylon.core.home import make_home
from babylon.core.objects import check
from babylon.core.processes import Processes, in_background, keep_logs_small, supervised
from babylon.core.settings import Settings
from babylon.ops.prefect_env import prefect_api
from babylon.ops.up.health import long_session, until_healthy
from babylon.ops.up.prefect_setup import create_pools, set_up_prefect
from babylon.ops.up.runs import end, own_runs
from babylon.ops.up.services import clear_scratch, environment, worker_service
from babylon.ops.up.take_up import take_up_lost
from babylon.ops.up.teller import Teller
from babylon.ops.up.turns import setting_up
from babylon.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """The workers of one pool on this machine.

    In the pool ``gpu``, each has as many of the machine's GPUs as an update has processes.
    """

    settings: Settings
    pool: str

    async def run(self) -> None:
        """Work until SIGINT or SIGTERM, which end the runs too. A worker that dies starts again.

        The pools are created if they are missing. A worker of the pool ``cpu`` also applies the
        deployments, hands lost windows to another worker, and tells news, as a supervisor does.

        Raises:
            ConfigError: A setting that all machines share is missing.
            BabylonError: The database, the object store or Prefect does not answer.
        """
        settings = self.settings
        self._require_shared()
        make_home(settings.home.root)
        await asyncio.to_thread(check, settings.home)
        await asyncio.to_thread(clear_scratch, settings.home)
        async with open_store(settings):
            pass
        # Also through a tunnel or on the server's own machine: other machines' runs live there too.
        api = replace(prefect_api(settings.home, settings.prefect), embedded=False)
        ours = environment(settings.home, api, settings.environment())
        processes, stop = Processes(home=settings.home.root), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        opening = partial(open_store, settings, game_may_be_away=True)
        async with long_session() as http, AsyncExitStack() as stack:
            await create_pools(http, api)
            # A GPU's machine is started often, and the commands of Prefect take half a minute.
            if self.pool == "cpu":
                async with opening() as store, setting_up(store):
                    await set_up_prefect(http, api, ours)
            for name, devices in self._workers():
                service = worker_service(settings.home, api, self.pool, name, ours | devices)
                await stack.enter_async_context(supervised(service, processes.recorder()))
                await until_healthy(http, processes, service)
                log.info("%s works on the pool %s at %s", name, self.pool, api.url)
            await stack.enter_async_context(in_background(keep_logs_small(settings.home.logs)))
            if self.pool == "cpu":
                lost = take_up_lost(opening, settings.windows.lease_s, http, api)
                await stack.enter_async_context(in_background(lost))
                teller = Teller(settings, http, api)
                await stack.enter_async_context(in_background(teller.set_up_and_tell()))
            await stop.wait()
            running = own_runs()
        # A worker that stops leaves them, and they would hold the GPU beside the next one's.
        await asyncio.to_thread(end, running)

    def _require_shared(self) -> None:
        needed = {
            "PREFECT_API_URL, or --url": self.settings.prefect.api_url,
            "DATABASE_URL": self.settings.database.url,
            "ARTIFACT_STORE": self.settings.artifact_store,
        }
        if missing := [name for name, value in needed.items() if not value]:
            raise ConfigError(
                f"a worker of its own machine needs {' and '.join(missing)}: the addresses that all"
                " machines share (docs/scale.md)"
            )

    def _workers(self) -> list[tuple[str, dict[str, str]]]:
        """Return name and environment of each worker."""
        name = f"{platform.node()}-{self.pool}"
        devices = visible_devices() if self.pool == "gpu" else ()
        each = self.settings.training.processes or len(devices)
        if len(devices) <= each:
            return [(name, {})]
        # A worker of the GPUs that are left over would take runs, and each update of it would fail.
        starts = range(0, len(devices) - each + 1, each)
        groups = [devices[at : at + each] for at in starts]
        return [
            (f"{name}-{'-'.join(group)}", {"CUDA_VISIBLE_DEVICES": ",".join(group)})
            for group in groups
        ]


def visible_devices() -> Sequence[str]:
    """Return the GPUs of ``CUDA_VISIBLE_DEVICES``, or all of this machine, or none."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one for one in given.split(",") if one]
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
        return listed.stdout.split()
    return ()
