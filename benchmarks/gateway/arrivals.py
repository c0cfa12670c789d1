"""Load generator: calls that arrive at random times, whether or not earlier ones are answered.

One thread waits with ``select``, whose timeouts are exact to about 0.1 ms. Those of event loops are
whole milliseconds: calls would arrive together, and wait for each other in what is measured.
"""

import gc
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from random import Random
from urllib.parse import urlsplit

import httptools

from benchmarks.gateway.load import HEADERS, PATH, Latencies, Target, check, request_body

CONNECTIONS = 32  # made before the first call; more are made when they are needed


class _Connection:
    """A connection that carries one call at a time. The parser calls the methods ``on_*``."""

    def __init__(self, target: Target, stream: bool) -> None:
        self.target, self._stream = target, stream
        url = urlsplit(target.url)
        self._socket = socket.create_connection((url.hostname, url.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, seed: int) -> None:
        body = request_body(seed=seed, stream=self._stream, long=False)
        head = f"POST {PATH} HTTP/1.1\r\nHost: gateway\r\n{HEADERS.format(key=self.target.key)}"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._answer, self._complete = bytearray(), False
        self._parser = httptools.HttpResponseParser(self)
        self._sent = time.perf_counter()
        self._socket.sendall(data)

    def receive(self) -> float | None:
        """Read what has arrived; return the seconds of the call if it is the end of the answer."""
        self._parser.feed_data(self._socket.recv(2**18))
        if not self._complete:
            return None
        taken = time.perf_counter() - self._sent
        check(self.target, self._parser.get_status_code(), bytes(self._answer), long=False)
        return taken

    def on_body(self, body: bytes) -> None:
        self._answer += body

    def on_message_complete(self) -> None:
        self._complete = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def arriving(
    rates: Mapping[Target, float], *, seconds: float, stream: bool, seed: int
) -> tuple[dict[Target, Latencies], list[float]]:
    """Send calls as a Poisson process.

    Args:
        rates: calls a second of each target, which all get theirs in the same seconds: what else
            the machine does then delays the answers of all.
        seed: determines the times and the targets.

    Returns:
        The latencies of each target, and by how many seconds each call was sent too late.

    Raises:
        RuntimeError: An answer is wrong.
    """
    random, total = Random(seed), sum(rates.values())
    found: dict[Target, list[float]] = {target: [] for target in rates}
    late: list[float] = []
    with ExitStack() as stack:

        def connect(target: Target) -> _Connection:
            return stack.enter_context(closing(_Connection(target, stream)))

        gc.collect()
        gc.disable()  # while it is stopped, calls become due that are then sent together
        stack.callback(gc.enable)
        idle = {target: [connect(target) for _ in range(CONNECTIONS)] for target in rates}
        running: set[_Connection] = set()
        begun = time.perf_counter()
        due = random.expovariate(total)
        while due < seconds or running:
            left_s = begun + due - time.perf_counter() if due < seconds else None
            if left_s is not None and left_s <= 0:
                late.append(-left_s)
                (target,) = random.choices(list(rates), list(rates.values()))
                connection = idle[target].pop() if idle[target] else connect(target)
                connection.send(random.randrange(1000))
                running.add(connection)
                due += random.expovariate(total)
                continue
            for connection in select.select(running, [], [], left_s)[0]:
                if (taken := connection.receive()) is not None:
                    found[connection.target].append(taken)
                    running.remove(connection)
                    idle[connection.target].append(connection)
        wall_s = time.perf_counter() - begun
    measured = {target: Latencies(seconds=one, wall_s=wall_s) for target, one in found.items()}
    return measured, late
