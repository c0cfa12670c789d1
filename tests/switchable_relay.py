"""A database that goes away and comes back, without touching the one that others use."""

import asyncio
import contextlib
from urllib.parse import urlsplit

from pydantic import SecretStr

from babylon.core.settings import Settings
from tests.ports import free_port


class SwitchableRelay:
    """A TCP relay to a local port, that a test can shut and open again."""

    @classmethod
    def of(cls, settings: Settings) -> tuple["SwitchableRelay", Settings]:
        """A relay to the settings' database, and the settings that go through it."""
        assert settings.database.url is not None
        url = urlsplit(settings.database.url.get_secret_value())
        relay = cls(url.port or 5432)
        through = url._replace(netloc=url.netloc.replace(str(url.port), str(relay.port))).geturl()
        return relay, settings.replace(database={"url": SecretStr(through)})

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "SwitchableRelay":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shut()
        await asyncio.sleep(0)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._enter, "127.0.0.1", self.port)

    def shut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, inner_writer]
        await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()
