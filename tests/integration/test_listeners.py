"""The gateway beyond loopback: TLS by certificate files, and never without a key."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from babylon.cli import main
from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.serving.gateway.app import Gateway
from babylon.serving.gateway.asgi import Receive, Response, Scope, Send
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.listeners import listeners, serve_all
from babylon.serving.gateway.play.app import play_app
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.store import Store
from babylon.store.api_keys import create_key
from tests.ports import free_port


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(send).whole(b"ok")


GATEWAY = cast(Gateway, ok)


async def test_beyond_loopback_it_needs_a_key_and_https_a_certificate(
    store: Store, settings: Settings
) -> None:
    url = f"https://0.0.0.0:{free_port()}"
    beyond = settings.replace(serving={"listen": url})
    with pytest.raises(ConfigError, match="babylon keys create"):
        await listeners(GATEWAY, store, beyond.serving)
    await create_key(store, "alice", scopes=["infer"])
    with pytest.raises(ConfigError, match="TLS_CERTIFICATE=None"):
        await listeners(GATEWAY, store, beyond.serving)
    plain = beyond.replace(serving={"listen": url.replace("https", "http")})
    assert len(await listeners(GATEWAY, store, plain.serving)) == 2
    assert len(await listeners(GATEWAY, store, settings.serving)) == 1


def test_a_gateway_without_a_key_says_so_in_one_line(database_url: str, tmp_path: Path) -> None:
    given = {
        "DATABASE_URL": database_url,
        "BABYLON_HOME": str(tmp_path),
        "LOCAL_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "GATEWAY_LISTEN": f"http://0.0.0.0:{free_port()}",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "babylon.serving.gateway.gateway_process"],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"gateway: GATEWAY_LISTEN={given['GATEWAY_LISTEN']}"), ended.stderr
    assert "babylon keys create" in last and "Traceback" not in ended.stderr


async def test_agents_call_with_tls_beside_loopback(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    certificate, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    subprocess.run(
        ["openssl", *command.split(), *names, "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    await create_key(store, "alice", scopes=["infer"])
    given = settings.replace(
        serving={
            "endpoint": f"http://localhost:{free_port()}",
            "listen": f"https://127.0.0.1:{port}",
            "tls_certificate": certificate,
            "tls_key": key,
        }
    ).serving
    servers = await listeners(GATEWAY, store, given)
    serving = asyncio.create_task(serve_all(servers))
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while not all(server.started for server in servers):
            await asyncio.sleep(0.02)
        for url in (f"https://localhost:{port}", given.endpoint):
            async with session.get(url, ssl=trusting) as response:
                assert await response.text() == "ok"
        servers[1].should_exit = True  # as a signal does: both end
        await serving


def test_agents_elsewhere_are_told_the_public_address_and_local_programs_keep_theirs(
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))
    told = []
    for public in ("", "https://agents.example.com/"):
        monkeypatch.setenv("GATEWAY_PUBLIC_URL", public)
        with pytest.raises(SystemExit, match="0"):
            main(["keys", "create", "alice", "--json"])
        told.append(json.loads(capsys.readouterr().out)["url"])
    assert told == ["http://localhost:8000/v1", "https://agents.example.com/v1"]
    serving = load_settings().serving
    assert (serving.endpoint, serving.endpoint_port) == ("http://localhost:8000", 8000)
    nobody = cast(PlayHandler, None), cast(KeyRing, None), cast(KeyLimits, None)
    assert "servers" not in play_app(*nobody).openapi()
    described = play_app(*nobody, serving.public_url).openapi()
    assert described["servers"] == [{"url": "https://agents.example.com/"}]
