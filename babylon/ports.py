"""Is a port free, and if not, whose is it."""

import socket
from contextlib import suppress

import psutil

from babylon.errors import ServingError


def require_free_port(port: int, *, user: str, variable: str) -> None:
    """Before ``user`` listens on it; ``variable`` is the setting that moves it elsewhere.

    Raises:
        ServingError: the port is taken; names the process that has it, where one may know.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServingError(
                f"port {port} for {user} is taken{_holder(port)}: stop that program"
                f" (`babylon down`?), or choose another port with {variable}"
            ) from error


def _holder(port: int) -> str:
    """`` by process 123 (name)`` where the system lets us know."""
    with suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
