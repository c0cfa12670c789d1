"""The addresses of the gateway: loopback, and optionally one more, with TLS or without.

Programs of this machine use loopback without TLS. Beyond it, the gateway listens only if somebody
holds a key of their own. One of several processes shares these addresses, and has its control
address besides.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from babylon.core.errors import ConfigError
from babylon.core.settings import ServingSettings
from babylon.serving.gateway.dialects.translation import Application
from babylon.serving.gateway.http_guard import server_config
from babylon.serving.gateway.last_known import LastKnown
from babylon.serving.gateway.workers import Worker
from babylon.store import Store
from babylon.store.api_keys import list_keys
from babylon.store.connection import UNREACHABLE


class _SocketServer(uvicorn.Server):
    """Listens on a socket that ``open_socket`` returns when it starts."""

    def __init__(self, config: uvicorn.Config, open_socket: Callable[[], socket.socket]) -> None:
        super().__init__(config)
        self._open_socket = open_socket

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve([self._open_socket()])


async def listeners(
    gateway: Application,
    store: Store,
    serving: ServingSettings,
    last_known: LastKnown | None = None,
    worker: Worker | None = None,
) -> list[uvicorn.Server]:
    """Return the servers of the gateway, or of one of its processes.

    Raises:
        ConfigError: the further address is asked for, and there is no key, or no certificate.
    """
    configs = [server_config(gateway, host="127.0.0.1", port=serving.endpoint_port)]
    if serving.listen:
        url = urlsplit(serving.listen)
        try:  # without Postgres, the keys of the last start are enough
            keys = await list_keys(store)
        except UNREACHABLE:
            keys = [*last_known.keys] if last_known else []
        if not any(key.revoked_at is None for key in keys):
            raise ConfigError(
                f"GATEWAY_LISTEN={serving.listen}: there is no API key for other machines: make one"
                " with `babylon keys create NAME`"
            )
        tls = {}
        if url.scheme == "https":
            tls["ssl_certfile"] = _present("TLS_CERTIFICATE", serving.tls_certificate)
            tls["ssl_keyfile"] = _present("TLS_KEY", serving.tls_key)
        configs.append(server_config(gateway, host=url.hostname, port=url.port, **tls))
    if worker is None:
        return [uvicorn.Server(config) for config in configs]
    control = _SocketServer(server_config(gateway), lambda: socket.socket(fileno=worker.control))
    return [*map(_shared, configs), control]


def _shared(config: uvicorn.Config) -> uvicorn.Server:
    address = config.host, config.port
    return _SocketServer(config, lambda: socket.create_server(address, reuse_port=True))


def _present(variable: str, file: Path | None) -> Path:
    if file is None or not file.is_file():
        raise ConfigError(f"{variable}={file}: name the PEM file, or listen at http://")
    return file


async def serve_all(servers: Sequence[uvicorn.Server]) -> None:
    """Serve until the first one ends, for which a signal to one of them is enough."""
    running = [asyncio.create_task(server.serve()) for server in servers]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*running)
