"""A TCP relay in a process of its own that a test can silence (SIGSTOP) and wake (SIGCONT).

The kernel goes on accepting and acknowledging for a halted process, as it does for a halted pooler:
no packet is lost, no connection breaks, and no answer comes.
"""

import os
import signal
import subprocess
import sys
from typing import Self
from urllib.parse import urlsplit

PROGRAM = """
import asyncio, sys

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()

async def enter(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pump(reader, back), pump(there, writer))

async def main():
    server = await asyncio.start_server(enter, sys.argv[2], 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class SilentRelay:
    """``url``: the database through the relay."""

    def __init__(self, url: str, host: str = "127.0.0.1") -> None:
        self._parts = urlsplit(url)
        self._host = host

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", PROGRAM, str(self._parts.port), self._host]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        account = self._parts.netloc.rpartition("@")[0]
        netloc = f"{account}@{self._host}:{port}"
        self.url = self._parts._replace(netloc=netloc).geturl()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def silence(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
