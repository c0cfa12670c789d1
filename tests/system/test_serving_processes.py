"""``babylon serve``: both processes for real, and what happens when one is killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.serving.gateway.http_guard import raise_file_limit
from babylon.serving.serve import serving
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import live_gateways
from babylon.store.policies import ensure_base
from benchmarks.gateway.upstream import Upstream
from tests.integration.test_serving import on_uvicorn, openai_client, until_healthy
from tests.ports import free_port
from tests.switchable_relay import SwitchableRelay
from tests.tiny_policy import save_tiny_policy

T = TypeVar("T")
FEW_FILES = ("sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh")  # as most systems set it
IDLE = 5000 if os.environ.get("FAULTS") == "all" else 1200


@pytest.fixture
def settings(settings: Settings) -> Settings:
    ports = {"serving": {"endpoint": f"http://localhost:{free_port()}", "engine_port": free_port()}}
    return settings.replace(**ports)


async def ask(client: AsyncOpenAI, max_tokens: int = 200) -> str:
    """Stream one answer; returns the call id once the whole answer has come."""
    response = await client.chat.completions.with_raw_response.create(
        model="babylon",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=max_tokens,
        stream=True,
        logit_bias={},
    )
    async for _ in response.parse():
        pass
    return response.headers["x-call-id"]


async def test_a_killed_process_restarts(settings: Settings, store: Store, tmp_path: Path) -> None:
    await ensure_base(store, uri=str(save_tiny_policy(tmp_path / "v0", 0)), base_model="tiny")
    answered: list[str] = []
    errors: list[str] = []
    done = asyncio.Event()

    async def agent(client: AsyncOpenAI) -> None:
        while not done.is_set():
            try:
                answered.append(await ask(client))
            except (openai.APIError, httpx.TransportError) as error:
                errors.append(str(error))
                await asyncio.sleep(0.05)

    async with (
        asyncio.timeout(120),
        serving(settings.serving, settings.home, settings.environment()) as running,
        openai_client(settings.serving.endpoint, settings) as client,
    ):
        agents = [asyncio.create_task(agent(client)) for _ in range(4)]
        for process in (running.engine, *running.gateways):
            await more_than(answered, 4)
            killed = process.pid
            os.kill(killed, signal.SIGKILL)
            while process.pid == killed:
                await asyncio.sleep(0.02)
        await more_than(answered, 4)
        done.set()
        await asyncio.gather(*agents)

    assert any("the engine" in error for error in errors), errors
    rows = await store.pool.fetch("SELECT call_id FROM babylon.calls WHERE trainable")
    assert set(answered) <= {row["call_id"] for row in rows}
    assert not await live_gateways(store)
    assert not engines()


def engines() -> list[str]:
    """Command lines of engines that this process left behind."""
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    commands = [" ".join(child.cmdline()) for child in alive]
    return [command for command in commands if "babylon.serving.engine" in command]


async def more_than(answered: list[str], more: int) -> None:
    start = len(answered)
    while len(answered) < start + more:
        await asyncio.sleep(0.02)


async def test_busy_port_is_named_before_anything_starts(settings: Settings) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.serving.engine_port))
        other.listen()
        with pytest.raises(
            ServingError, match=f"port {settings.serving.engine_port} .* ENGINE_PORT"
        ):
            async with serving(settings.serving, settings.home, settings.environment()):
                pass
    assert not settings.home.logs.exists()


async def test_a_failed_process_is_an_error_with_its_log(settings: Settings, store: Store) -> None:
    await store.pool.execute("UPDATE babylon.alembic_version SET version_num = '0000'")
    with pytest.raises(ServingError, match=r"gateway ended with code 1: .*gateway\.log"):
        async with serving(settings.serving, settings.home, settings.environment()):
            pass
    assert not engines()


def gateway_process(settings: Settings) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*FEW_FILES, sys.executable, "-m", "babylon.serving.gateway.gateway_process"],
        env={**os.environ, **settings.environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def test_idle_connections_beyond_the_soft_limit_of_files_stop_no_call(
    settings: Settings, store: Store
) -> None:
    """``make faults`` opens 5,000, which needs a hard limit of 10,000 files here."""
    raise_file_limit()  # of this process, which has the other ends
    await ensure_base(store, uri="/canned", base_model="canned")
    engine = socket.socket()
    engine.bind(("127.0.0.1", settings.serving.engine_port))
    port = settings.serving.endpoint_port
    request = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"

    async def idle() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asked(reader, writer)
        return reader, writer

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        answer = await reader.readuntil(b'{"status":"ok"}')
        assert answer.startswith(b"HTTP/1.1 200"), answer

    async with (
        asyncio.timeout(600),
        on_uvicorn(Upstream(), engine),
        openai_client(settings.serving.endpoint, settings) as client,
    ):
        gateway = gateway_process(settings)
        try:
            await until_healthy(settings.serving.endpoint, timeout_s=120)
            kept = [one for _ in range(IDLE // 100) for one in await gathered(idle, 100)]
            files = psutil.Process(gateway.pid).num_fds()
            answered = [await ask(client) for _ in range(20)]
            for reader, writer in kept[:: IDLE // 100]:
                await asked(reader, writer)
            for _, writer in kept:
                writer.close()
        finally:
            gateway.terminate()
            gateway.wait()
    print(f"{IDLE} idle connections, {files} files, {len(answered)} calls answered")
    assert len(kept) == IDLE and files > IDLE


async def gathered(make: Callable[[], Awaitable[T]], count: int) -> list[T]:
    return await asyncio.gather(*(make() for _ in range(count)))


async def test_a_killed_gateways_calls_are_stored_once(settings: Settings, store: Store) -> None:
    """Killed under load, while the database is away: nothing but the disk knows the calls."""
    await ensure_base(store, uri="/canned", base_model="canned")
    relay, behind = SwitchableRelay.of(settings)
    engine = socket.socket()
    engine.bind(("127.0.0.1", settings.serving.engine_port))
    answered: list[str] = []
    async with (
        asyncio.timeout(60),
        on_uvicorn(Upstream(), engine),
        relay,
        openai_client(settings.serving.endpoint, settings) as client,
    ):
        gateway = gateway_process(behind)
        await until_healthy(settings.serving.endpoint)

        async def agent() -> None:
            with suppress(openai.APIError, httpx.TransportError):
                while True:
                    answered.append(await ask(client))

        agents = [asyncio.create_task(agent()) for _ in range(8)]
        await more_than(answered, 40)
        relay.shut()
        await more_than(answered, 200)
        gateway.kill()
        gateway.wait()
        await asyncio.gather(*agents)
        stored = await store.pool.fetchval("SELECT count(*) FROM babylon.calls")
        assert 0 < stored < len(answered)

        gateway = gateway_process(settings)
        try:
            await until_healthy(settings.serving.endpoint)
            await wait_until_recorded(store)
        finally:
            gateway.terminate()
            gateway.wait()
        await relay.open()
    rows = await store.pool.fetch("SELECT call_id, trainable FROM babylon.calls")
    assert {row["call_id"] for row in rows} >= set(answered)
    assert all(row["trainable"] for row in rows)
    assert not list(settings.home.recording.iterdir())
