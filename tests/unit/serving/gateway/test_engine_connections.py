"""HTTP with engines, whose bytes come from a server that writes them as the test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from babylon.serving.gateway import engine_connections
from babylon.serving.gateway.engine_connections import EngineConnections

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
CLOSE = b""  # in a script: the server closes the connection


class Server:
    """``requests`` are the heads that arrived, ``connections`` the number of connections."""

    def __init__(self, script: Sequence[Sequence[bytes]]) -> None:
        self.script = list(script)
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.http = EngineConnections()
        self.url = ""

    async def ask(self, body: bytes = b"{}", *, fresh: bool = False) -> bytes:
        async with await self.http.ask("POST", self.url, "A: b\r\n", body, fresh=fresh) as response:
            return b"%d " % response.status + await response.read()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while self.script:
                self.requests.append(await reader.readuntil(b"{}"))
                for part in self.script.pop(0):
                    if part == CLOSE:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*script: Sequence[bytes]) -> AsyncIterator[Server]:
    """A server that answers the requests, of whichever connection, with the parts of each item."""
    server = Server(script)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{port}/v1/x"
        yield server
        server.http.close()
        for writer in server.writers:
            writer.close()


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED, EMPTY])
async def test_an_answer_cut_anywhere_arrives_whole_and_its_connection_is_used_again(
    answer: bytes,
) -> None:
    cuts = [(answer[:cut], answer[cut:]) for cut in range(1, len(answer))]
    async with serving(*cuts) as server:
        expected = b"204 " if answer is EMPTY else b"200 hello"
        assert {await server.ask() for _ in cuts} == {expected}
        assert server.connections == 1
        host = server.url.split("/")[2].encode()
    head = b"POST /v1/x HTTP/1.1\r\nHost: %s\r\nA: b\r\nContent-Length: 2\r\n\r\n{}" % host
    assert set(server.requests) == {head}


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with serving([UNTIL_CLOSED[:-2], UNTIL_CLOSED[-2:], CLOSE], [LENGTH]) as server:
        assert [await server.ask(), await server.ask()] == [b"200 hello"] * 2
        assert server.connections == 2


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED])
async def test_an_answer_that_ends_early_is_an_error_at_every_byte(answer: bytes) -> None:
    cuts = [(answer[:cut], CLOSE) for cut in range(len(answer))]
    async with serving(*cuts, [LENGTH]) as server:
        for _ in cuts:
            with pytest.raises(ConnectionError, match="closed"):
                await server.ask()
        assert await server.ask() == b"200 hello"


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n", b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n"])
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with serving([answer, LENGTH]) as server:
        with pytest.raises(ConnectionError):
            await server.ask()


async def test_bytes_after_an_answer_are_nobodys_answer() -> None:
    async with serving([LENGTH + LENGTH], [EMPTY]) as server:
        assert [await server.ask(), await server.ask()] == [b"200 hello", b"204 "]
        assert server.connections == 2


async def test_a_connection_that_was_closed_meanwhile_or_rested_too_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving([LENGTH, CLOSE], [LENGTH], [LENGTH], [LENGTH]) as server:
        await server.ask()
        await asyncio.sleep(0.05)
        await server.ask()
        assert server.connections == 2
        monkeypatch.setattr(engine_connections, "KEPT_S", -1)
        await server.ask()
        assert server.connections == 3
        monkeypatch.undo()
        await server.ask(fresh=True)
        assert server.connections == 4


async def test_an_answer_that_was_left_early_takes_its_connection_along() -> None:
    async with serving([LENGTH[:-1]], [LENGTH]) as server:
        async with await server.http.ask("POST", server.url, "", b"{}") as response:
            assert await response.readany() == b"hell"
        with pytest.raises(ConnectionError):
            await response.readany()
        assert await server.ask() == b"200 hello"
        assert server.connections == 2


async def test_silence_within_an_answer_has_a_limit_and_each_part_begins_it_anew() -> None:
    async with serving([LENGTH[:-1]]) as server:
        response = await server.http.ask("POST", server.url, "", b"{}")
        assert await response.readany(2) == b"hell"
        with pytest.raises(TimeoutError, match="nothing arrived for 2 s"):
            await response.readany(2)
        response.close()


async def test_an_answer_that_nobody_reads_stays_at_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_connections, "MAX_UNREAD", 2**16)
    size = 2**25  # more than both sockets hold
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    async with serving([head, bytes(size)], [LENGTH]) as server:
        async with await server.http.ask("POST", server.url, "", b"{}") as response:
            await asyncio.sleep(0.1)
            assert sum(map(len, response.unread)) < 2**20
            assert len(await response.read()) == size
        assert await server.ask() == b"200 hello"
        assert server.connections == 1


async def test_nobody_listens() -> None:
    with pytest.raises(ConnectionRefusedError):
        await EngineConnections().ask("GET", "http://127.0.0.1:9/x", "")
