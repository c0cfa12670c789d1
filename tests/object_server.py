"""A real S3 API on loopback (moto's server), and a proxy before it that fails as asked.

``TEST_MOTO`` names the Python that has moto; by default it is this one.
"""

import asyncio
import io
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.ports import free_port

SESSION = web.AppKey("session", aiohttp.ClientSession)
MOTO = os.environ.get("TEST_MOTO", sys.executable)
BUCKET = "babylon-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def object_server(
    directory: Path, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> Iterator[str]:
    """Run moto's server and make the bucket; yield its URL. ``prefix``: of the command line."""
    if subprocess.run([MOTO, "-c", "import moto.server"], capture_output=True).returncode:
        pytest.skip(
            "moto is not installed: pip install 'moto[s3]' flask flask-cors, or set TEST_MOTO"
        )
    port = free_port()
    url = f"http://{host}:{port}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (directory / "moto.log").open("wb") as log:
        server = subprocess.Popen(
            [*prefix, MOTO, "-m", "moto.server", "-H", host, "-p", str(port)],
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        for _ in range(600):
            with suppress(OSError):
                request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                break
            assert server.poll() is None, (directory / "moto.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


@dataclass
class Faults:
    """The next answers that fail, by kind; each takes one off. ``seen`` counts requests."""

    left: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    about: Callable[[web.Request], bool] = lambda request: True
    slow_s: float = 0.3

    def take(self, request: web.Request) -> str | None:
        self.seen[request.method] += 1
        kind = next((kind for kind in self.left if self.left[kind] > 0), None)
        if kind is None or not self.about(request):
            return None
        self.left[kind] -= 1
        self.seen[kind] += 1
        return kind


@contextmanager
def faulty_proxy(upstream: str, faults: Faults) -> Iterator[str]:
    """Run a proxy in a thread: answers are ``refused`` (503), ``torn``, ``flipped`` or ``slow``."""
    ready, done, address = threading.Event(), threading.Event(), list[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        kind = faults.take(request)
        body = await request.read()
        if kind == "refused":
            return web.Response(status=503, text="SlowDown")
        session = request.app[SESSION]
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        async with session.request(
            request.method, upstream + request.raw_path, data=io.BytesIO(body), headers=headers
        ) as answered:
            data = await answered.read()
            kept = {k: v for k, v in answered.headers.items() if k.lower() not in _HOP}
            if kind is None or not data:
                if request.method == "HEAD":
                    kept["Content-Length"] = answered.headers.get("Content-Length", "0")
                return web.Response(status=answered.status, body=data or None, headers=kept)
        if kind == "flipped":
            data = bytes([data[0] ^ 1]) + data[1:]
            return web.Response(status=answered.status, body=data, headers=kept)
        response = web.StreamResponse(
            status=answered.status, headers={**kept, "Content-Length": str(len(data))}
        )
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        if kind == "torn":
            assert request.transport is not None
            request.transport.abort()
            return response
        await asyncio.sleep(faults.slow_s)
        await response.write(data[len(data) // 2 :])
        return response

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", answer)
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            app[SESSION] = session
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.02)
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield address[0]
    finally:
        done.set()
        thread.join(30)


_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding", "date", "server"}
