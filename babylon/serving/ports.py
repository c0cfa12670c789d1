"""Checks that a port is free, and finds the process that holds it."""

import socket
from contextlib import suppress

import psutil

from babylon.core.errors import ServingError


def require_free_port(port: int, *, user: str, variable: str) -> None:
    """Check a port before ``user`` listens on it. ``variable`` is the setting that changes it.

    Raises:
        ServingError: the port is taken. The message names the process that holds it, if the
            system tells.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServingError(
                f"port {port} for {user} is taken{_by_whom(port)}: stop that program"
                f" (`babylon down`?), or choose another port with {variable}"
            ) from error


def holder(port: int) -> int | None:
    """Return the pid of the process that listens on the port, if the system tells."""
    with suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    return None


def _by_whom(port: int) -> str:
    """Return `` by process 123 (name)``, or nothing if the system does not tell."""
    pid = holder(port)
    with suppress(psutil.Error):  # the process may have ended by now
        return f" by process {pid} ({psutil.Process(pid).name()})" if pid else ""
    return ""
