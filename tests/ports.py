"""Ports for programs that are told one and listen on it later."""

import secrets
import socket

LOWEST, EPHEMERAL = 20_000, 32_768  # from here on the system hands ports out by itself


def free_port() -> int:
    """A port that nobody listens on, drawn where neither connections nor port 0 take one."""
    while True:
        port = LOWEST + secrets.randbelow(EPHEMERAL - LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
