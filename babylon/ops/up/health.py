"""Health of the services of ``babylon up``."""

import asyncio
import time
from contextlib import suppress

import aiohttp

from babylon.core.errors import ServingError
from babylon.core.processes import Processes
from babylon.ops.up.services import UpService

TIMEOUT = aiohttp.ClientTimeout(total=5)
# Prefect's server closes a connection that was idle for 5 s. A request sent in that moment fails.
_IDLE_S = 2.0
_POLL_S = 0.5


def long_session() -> aiohttp.ClientSession:
    """A session for requests to Prefect and the services for as long as this process lives."""
    connector = aiohttp.TCPConnector(keepalive_timeout=_IDLE_S)
    return aiohttp.ClientSession(timeout=TIMEOUT, connector=connector)


async def until_healthy(
    http: aiohttp.ClientSession, processes: Processes, service: UpService
) -> None:
    """Return when a service that was started answers.

    Raises:
        ServingError: it died, or did not answer within its time.
    """
    deadline = time.monotonic() + service.start_s
    while not await is_healthy(http, service):
        died = processes.running(service.name) is None
        if died or time.monotonic() > deadline:
            what = "died" if died else f"did not answer within {service.start_s:.0f} s"
            raise ServingError(
                f"{service.name} {what}; the end of {service.log}:\n{service.log_tail()}"
            )
        await asyncio.sleep(_POLL_S)


async def is_healthy(http: aiohttp.ClientSession, service: UpService) -> bool:
    """Return True if the service answers its health check."""
    with suppress(aiohttp.ClientError, TimeoutError):
        return await service.healthy(http)
    return False
