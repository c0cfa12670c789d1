"""Which gateway this is: every process is one of its own, also beside others at one address."""

import os
import platform
import secrets

import psutil

from babylon.store import Store
from babylon.store.gateways import live_gateways, remove_gateway


def new_gateway_id(port: int) -> str:
    return f"{platform.node()}:{port}:{os.getpid()}:{secrets.token_hex(3)}"


async def remove_dead_gateways(store: Store, gateway_id: str) -> None:
    """Forget those of this host and port that were killed, so that nobody waits for them.

    One that lives after all, in a container of the same name, is there again with its next sign
    of life.
    """
    place, _, _ = gateway_id.rsplit(":", 2)
    for gateway in await live_gateways(store):
        if gateway.gateway_id.startswith(f"{place}:"):
            pid = int(gateway.gateway_id.split(":")[-2])
            if pid == os.getpid() or not psutil.pid_exists(pid):
                await remove_gateway(store, gateway.gateway_id)
