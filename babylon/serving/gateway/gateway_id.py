"""Identity of a gateway process. Several gateways may share one address, also over time."""

import os
import platform
import secrets

import psutil

from babylon.store import Store
from babylon.store.gateways import live_gateways, remove_gateway


def new_gateway_id(port: int) -> str:
    return f"{platform.node()}:{port}:{os.getpid()}:{secrets.token_hex(3)}"


async def remove_dead_gateways(store: Store, gateway_id: str) -> None:
    """Remove the rows of gateways on this host and port whose processes are gone.

    A deployment then does not wait for them. A gateway that still runs, in a container with the
    same host name, adds its row again with its next announcement.
    """
    place, _, _ = gateway_id.rsplit(":", 2)
    for gateway in await live_gateways(store):
        if gateway.gateway_id.startswith(f"{place}:"):
            pid = int(gateway.gateway_id.split(":")[-2])
            if pid == os.getpid() or not psutil.pid_exists(pid):
                await remove_gateway(store, gateway.gateway_id)
