"""A TCP relay in a process of its own that a test can silence, delay and reset by signals.

SIGSTOP silences it and SIGCONT wakes it: the kernel goes on accepting and acknowledging for a
halted process, as it does for a halted pooler. No packet is lost, no connection breaks, and no
answer comes. ``DELAY`` delays each direction by ``DELAY_S``, until ``NO_DELAY``. ``RESET`` resets
all connections at both ends, and the relay prints their number.
"""

import os
import signal
import subprocess
import sys
from typing import Self
from urllib.parse import urlsplit

DELAY, NO_DELAY, RESET = signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2
DELAY_S = 0.05
# Arguments: host and port of the target, own host and port (0 for a free one), delay.
PROGRAM = """
import asyncio, signal, socket, struct, sys

target, port, host, own_port, longer_s = sys.argv[1:]
delay_s = 0.0
transports = set()

def delay(seconds):
    global delay_s
    delay_s = seconds

def reset():
    alive = [one for one in transports if not one.is_closing()]
    for one in alive:
        at_once = struct.pack("ii", 1, 0)  # without the goodbye of an orderly close
        one.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        one.abort()
    print("reset", len(alive) // 2, flush=True)

async def pump(reader, writer):
    transports.add(writer.transport)
    try:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)  # what arrives meanwhile waits too, at most twice as long
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    transports.discard(writer.transport)
    writer.close()

async def enter(reader, writer):
    try:
        there, back = await asyncio.open_connection(target, int(port))
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(pump(reader, back), pump(there, writer))

async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, delay, float(longer_s))
    loop.add_signal_handler(signal.SIGHUP, delay, 0.0)
    loop.add_signal_handler(signal.SIGUSR2, reset)
    server = await asyncio.start_server(enter, host, int(own_port))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def relay_command(url: str, host: str, port: int = 0) -> list[str]:
    """A relay to the server at ``url``. Its first line of output is its port."""
    target = urlsplit(url)
    places = (str(target.hostname), str(target.port), host, str(port))
    return [sys.executable, "-c", PROGRAM, *places, str(DELAY_S)]


def through(url: str, host: str, port: int | str) -> str:
    """The same URL at another place."""
    parts = urlsplit(url)
    account = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{account}@{host}:{port}").geturl()


class SilentRelay:
    """``url``: the database through the relay."""

    def __init__(self, url: str, host: str = "127.0.0.1") -> None:
        self._target = url
        self._host = host

    def __enter__(self) -> Self:
        command = relay_command(self._target, self._host)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = through(self._target, self._host, self._process.stdout.readline().strip())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def silence(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
