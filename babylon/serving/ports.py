"""Checks that a port is free, and finds the process that holds it."""

import asyncio
import os
import socket
import time
from contextlib import suppress

import psutil

from babylon.core.errors import ServingError
from babylon.core.processes import SUPERVISOR

PATIENCE_S = 20.0  # longer than a gateway needs to end its calls
_POLL_S = 0.2


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


async def wait_for_port(port: int, *, user: str, variable: str) -> None:
    """Wait for a port that the orphan of a killed supervisor may still hold, then check it.

    Raises:
        ServingError: the port is taken. Without a supervisor there is no orphan, and the error is
            raised at once.
    """
    patience_s = PATIENCE_S if SUPERVISOR in os.environ else 0.0
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return require_free_port(port, user=user, variable=variable)
        except ServingError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_POLL_S)


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
