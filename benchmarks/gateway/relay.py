"""A relay that copies bytes between clients and the engine, and does nothing else.

    python -m benchmarks.gateway.relay --port 9001 --engine-port 9000

What it adds to a call is what a second process on the way costs on this machine: the least that a
gateway in Python can add. ``python -m benchmarks.gateway.latency --relay`` measures it.
"""

import argparse
import asyncio

import uvloop


class _Side(asyncio.Protocol):
    """One of two connections. ``held``: what arrived before the other one was made."""

    other: asyncio.Transport | None = None

    def __init__(self) -> None:
        self.held = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other:
            self.other.write(data)
        else:
            self.held += data

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other:
            self.other.close()


class _ClientSide(_Side):
    """A client's connection; each gets one to the engine."""

    def __init__(self, engine_port: int) -> None:
        super().__init__()
        self._engine_port = engine_port

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(_Side, "127.0.0.1", self._engine_port)
        engine.other, self.other = self.transport, engine.transport
        self.other.write(self.held)


async def serve(port: int, engine_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _ClientSide(engine_port), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.engine_port))


if __name__ == "__main__":
    main()
