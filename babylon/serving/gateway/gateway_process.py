"""The gateway process: settings from the environment, uvicorn on its listeners."""

import asyncio
import gc
import logging
import os
import platform
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
import uvicorn
import uvloop

from babylon.core.errors import BabylonError
from babylon.core.memory import keep_memory_small
from babylon.core.processes import exit_with_supervisor, in_background
from babylon.core.settings import DatabaseSettings, ServingSettings, Settings
from babylon.core.settings_loading import load_settings
from babylon.serving.gateway.app import open_gateway
from babylon.serving.gateway.http_guard import raise_file_limit
from babylon.serving.gateway.last_known import last_known_file, store_or_last_known
from babylon.serving.gateway.listeners import listeners, serve_all
from babylon.serving.gateway.route_table import RouteTable
from babylon.serving.gateway.workers import Worker, until_settled, worker_from_options
from babylon.store import Store, open_store
from babylon.store.address import parse_url
from babylon.store.connection import UNREACHABLE
from babylon.store.gateways import live_gateways, remove_gateway, remove_old_gateways


async def run(settings: Settings, worker: Worker | None) -> None:
    """Serve until SIGTERM or SIGINT. ``worker``: this process, if it is one of several."""
    port = settings.serving.endpoint_port
    gateway_id, table = new_gateway_id(port), RouteTable()
    last_known = last_known_file(settings.home.root, port, settings.database)
    known = last_known.read()
    # What was known last tells more of the game's tables than a store that opens without them.
    alone = known is None or settings.database.url is None
    opened = open_store(settings, game_may_be_away=alone)
    async with store_or_last_known(opened, settings.database, settings.home, known) as store:
        with suppress(*UNREACHABLE):
            await remove_dead_gateways(store, gateway_id)
        async with open_gateway(
            store,
            settings.home,
            settings.serving,
            alias=settings.model.name,
            engine_url=settings.serving.gateways_engines,
            gateway_id=gateway_id,
            url=worker.url if worker else announced_url(settings.serving, settings.database),
            minutes=settings.windows.minutes,
            last_known=last_known,
            table=table,
            worker=worker,
        ) as gateway:
            servers = await listeners(gateway, store, settings.serving, known, worker)
            if worker:
                await until_settled(table.readiness)
            await _serve(servers)


def announced_url(serving: ServingSettings, database: DatabaseSettings) -> str:
    """Return the address at which deployments on other machines reach this gateway.

    By default it is that of ``GATEWAY_LISTEN``. A gateway that listens on all addresses announces
    the one with which it reaches the database, as the others do. Without ``GATEWAY_LISTEN`` only
    this machine reaches it.
    """
    if serving.address:
        return serving.address
    if not serving.listen:
        return serving.endpoint
    url = urlsplit(serving.listen)
    if url.hostname not in ("0.0.0.0", "::"):
        return serving.listen
    host = "127.0.0.1"
    if database.url is not None:
        name, port = parse_url(database.url.get_secret_value()).hosts[0]
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, port))  # nothing is sent: it only chooses the way
            host = probe.getsockname()[0]
    return f"{url.scheme}://{host}:{url.port}"


def new_gateway_id(port: int) -> str:
    """Return an id of this process. Several gateways may share one address, also over time."""
    return f"{platform.node()}:{port}:{os.getpid()}:{secrets.token_hex(3)}"


async def remove_dead_gateways(store: Store, gateway_id: str) -> None:
    """Remove the rows of gateways on this host and port whose processes are gone.

    A deployment then does not wait for them. A gateway that still runs, in a container with the
    same host name, adds its row again with its next announcement. Rows of other hosts go a day
    after their last announcement.
    """
    place, _, _ = gateway_id.rsplit(":", 2)
    await remove_old_gateways(store)
    for gateway in await live_gateways(store):
        if gateway.gateway_id.startswith(f"{place}:"):
            pid = int(gateway.gateway_id.split(":")[-2])
            if pid == os.getpid() or not psutil.pid_exists(pid):
                await remove_gateway(store, gateway.gateway_id)


async def _serve(servers: Sequence[uvicorn.Server]) -> None:
    gc.freeze()  # objects from the start live as long as the process: skip them in collections
    gc.set_threshold(10_000)  # calls leave few cycles, and looking for them took 3 % of a call
    sys.setswitchinterval(0.0005)  # the thread that records calls would wait up to 5 ms to write
    # uvicorn stops on a signal and then raises it again, which must not end the clean-up
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    async with in_background(exit_with_supervisor()), in_background(keep_memory_small()):
        await serve_all(servers)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(load_settings(), worker_from_options()))
    except BabylonError as error:
        sys.exit(f"gateway: {error}")
    except BaseExceptionGroup as group:  # the gateway's loops were running
        ours, others = group.split(BabylonError)
        if ours is None or others:
            raise
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        sys.exit(f"gateway: {first}")


if __name__ == "__main__":
    main()
