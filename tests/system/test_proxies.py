"""nginx and Caddy with the configurations of deploy/ in front of a gateway, where installed."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from babylon.core.settings import Settings
from babylon.serving.openai_wire import MAX_BODY_BYTES
from babylon.store import Store
from benchmarks.gateway.upstream import Upstream, events
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway
from tests.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = {
    "nginx": shutil.which("nginx", path="/usr/sbin:/usr/bin"),
    "caddy": shutil.which("caddy"),
}
NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr; events {}
http {
  access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  include babylon.conf;
}
"""


class Held(Upstream):
    """An engine that gives the first half of a stream, and the other half when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] != "POST":
            return await super().__call__(scope, receive, send)
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        if not json.loads(body + message["body"]).get("stream"):
            return await self._answer(body + message["body"], send)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first, second = events(True)[:4], events(True)[4:]
        await send({"type": "http.response.body", "body": b"".join(first), "more_body": True})
        leaves = asyncio.create_task(receive())
        goes_on = asyncio.create_task(self.go_on.wait())
        await asyncio.wait([leaves, goes_on], return_when=asyncio.FIRST_COMPLETED)
        if leaves.done() and not goes_on.done():
            self.left.set()
        goes_on.cancel()
        leaves.cancel()
        await send({"type": "http.response.body", "body": b"".join(second)})


@dataclass
class Proxied:
    """A running proxy in front of a gateway."""

    program: str
    url: str
    tls: ssl.SSLContext
    gateway: Canned
    engine: Held

    def http(self, **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.gateway.key}"}
        return httpx.AsyncClient(base_url=self.url, verify=self.tls, headers=headers, **options)


def certificate(folder: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)


def nginx_command(folder: Path, port: int, gateway: int) -> list[str]:
    own = (DEPLOY / "nginx" / "babylon.conf").read_text()
    for there, here in (
        ("127.0.0.1:8000", f"127.0.0.1:{gateway}"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/babylon/", ""),
        ("/etc/nginx/", ""),
    ):
        assert there in own
        own = own.replace(there, here)
    (folder / "babylon.conf").write_text(own)
    shutil.copy(DEPLOY / "nginx" / "babylon_proxy.conf", folder)
    (folder / "nginx.conf").write_text(NGINX)
    return [PROGRAMS["nginx"] or "", "-p", str(folder), "-c", "nginx.conf"]


def caddy_command(folder: Path, port: int, gateway: int) -> list[str]:
    own = (DEPLOY / "caddy" / "Caddyfile").read_text()
    site = f"https://localhost:{port} {{\n\tbind 127.0.0.1\n\ttls cert.pem key.pem\n"
    for there, here in (
        ("127.0.0.1:8000", f"127.0.0.1:{gateway}"),
        ("agents.example.com {\n", site),
        ("\n{\n\tservers", "\n{\n\tadmin off\n\tauto_https off\n\tservers"),
    ):
        assert there in own
        own = own.replace(there, here)
    (folder / "Caddyfile").write_text(own)
    return [PROGRAMS["caddy"] or "", "run", "--config", "Caddyfile", "--adapter", "caddyfile"]


@asynccontextmanager
async def running(command: list[str], folder: Path, port: int) -> AsyncIterator[None]:
    log = (folder / "log").open("wb")
    environment = {
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "HOME": str(folder),
    }
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=log, stderr=log, env=environment
    )
    try:
        async with asyncio.timeout(20):
            while True:
                assert process.returncode is None, (folder / "log").read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    break
        yield
    finally:
        process.terminate()
        await process.wait()
        log.close()


@pytest.fixture(params=PROGRAMS)
async def proxied(
    request: pytest.FixtureRequest, store: Store, settings: Settings, tmp_path: Path
) -> AsyncIterator[Proxied]:
    if PROGRAMS[request.param] is None:
        pytest.skip(f"needs {request.param}")
    make = {"nginx": nginx_command, "caddy": caddy_command}[request.param]
    folder, port, engine = tmp_path / "proxy", free_port(), Held()
    folder.mkdir()
    certificate(folder)
    tls = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    async with (
        canned_gateway(store, settings, engine) as gateway,
        running(make(folder, port, gateway.port), folder, port),
    ):
        yield Proxied(request.param, f"https://localhost:{port}", tls, gateway, engine)


async def test_agents_call_through_the_proxy_and_streams_are_not_held_up(proxied: Proxied) -> None:
    http = httpx.AsyncClient(verify=proxied.tls)
    client = AsyncOpenAI(
        base_url=f"{proxied.url}/v1", api_key=proxied.gateway.key, http_client=http, max_retries=0
    )
    asked: dict[str, Any] = {"model": "babylon", "messages": HELLO}
    async with client, asyncio.timeout(60):
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        text = (await anext(stream)).choices[0].delta.content
        text += (await anext(stream)).choices[0].delta.content  # the engine waits for this
        proxied.engine.go_on.set()
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == whole.choices[0].message.content

        proxied.engine.go_on.clear()
        broken_off = await client.chat.completions.create(**asked, stream=True)
        await anext(broken_off)
        await broken_off.close()
        await proxied.engine.left.wait()  # the proxy tells the gateway that the client left
        while len(rows := await proxied.gateway.rows()) < 3:  # and then the gateway records it
            pass
    assert [row["finish_reason"] for row in rows][:2] == ["stop", "stop"]
    assert "the client left" in rows[2]["untrainable_reason"]


async def test_only_what_agents_need_is_reached_and_bodies_have_the_gateways_limit(
    proxied: Proxied,
) -> None:
    async with proxied.http() as http:
        for path, status in (
            ("/v1/models", 200), ("/openapi.json", 200), ("/health", 200),
            ("/metrics", 404), ("/admin/status", 404), ("/", 404), ("/v1/../metrics", 404),
        ):  # fmt: skip
            assert (await http.get(path)).status_code == status, path
        fits = await http.post("/v1/events", content=b"{}".ljust(MAX_BODY_BYTES))
        assert fits.status_code == 400 and "events" in fits.text
        too_large = await http.post("/v1/events", content=b"{}".ljust(MAX_BODY_BYTES + 1))
        # Caddy may still send the body when the gateway has answered and closes.
        assert too_large.status_code in {"nginx": (413,), "caddy": (413, 502)}[proxied.program]
        refused = await http.get("/v1/models", headers={"authorization": "Bearer no"})
        assert refused.status_code == 401 and "babylon keys create" in refused.text
