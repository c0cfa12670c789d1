"""A Prefect server that is killed in the middle of a window costs nothing but a wait."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from aiohttp import web
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    temporary_settings,
)

from babylon.core.settings import Settings
from babylon.core.types import Scored, Trained
from babylon.core.windows import WindowState
from babylon.flows.train_window import train_window
from babylon.ops.prefect_env import inline_environment
from babylon.store import Store
from babylon.training.backends.train_input import Progress
from tests.flows.conftest import Workshop
from tests.ports import free_port

WINDOW = "2025-11-14T09:00"
AWAY_S = 5.0


class Server:
    """A real Prefect server of its own, on a port that stays the same."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self._environment = os.environ | inline_environment(home)
        database = f"sqlite+aiosqlite:///{home}/prefect.db"
        self._environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
        self._environment["PREFECT__SERVER_WEBSERVER_ONLY"] = "1"  # no schedules, no automations
        self.api = f"http://127.0.0.1:{self.port}/api"

    def start(self) -> None:
        app = ("--factory", "prefect.server.api.server:create_app")  # as an inline flow starts it
        command = [sys.executable, "-m", "uvicorn", *app, "--port", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=self._environment, **quiet)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                with urlopen(f"{self.api}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.2)
        raise AssertionError("the Prefect server does not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "prefect").mkdir()
    server = Server(tmp_path)
    await asyncio.to_thread(server.start)
    yield server
    server.kill()


async def test_a_window_survives_the_death_of_the_prefect_server(
    played: Settings,
    store: Store,
    workshop: Workshop,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed while the window trains, and is back a while after the stage has ended."""
    train = workshop.train
    back: list[asyncio.Task[None]] = []

    async def go_away() -> None:
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(server.start)

    async def outage(
        store: Store,
        settings: Settings,
        scored: Scored,
        *,
        progress: Progress,
        member: int | None,
    ) -> Trained:
        server.kill()
        back.append(asyncio.create_task(go_away()))
        return await train(store, settings, scored, progress=progress, member=member)

    monkeypatch.setattr("babylon.tasks.train.train_window", outage)
    retries = int(inline_environment(Path())["PREFECT_CLIENT_MAX_RETRIES"])
    with temporary_settings({PREFECT_API_URL: server.api, PREFECT_CLIENT_MAX_RETRIES: retries}):
        result = await train_window(WINDOW)
    await back[0]
    assert result.status == WindowState.DEPLOYED
    assert workshop.trained == [WINDOW]
    rows = await store.pool.fetch("SELECT state, epoch, attempts FROM babylon.windows")
    assert [tuple(row) for row in rows] == [(WindowState.DEPLOYED, 1, 0)]


async def test_a_call_is_repeated_while_the_database_of_the_server_restarts() -> None:
    """Prefect's server answers 500 then, which its client does not repeat by itself."""
    answers = iter([500, 500, 200])

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(True, status=next(answers))

    app, port = web.Application(), free_port()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    codes = {int(inline_environment(Path())["PREFECT_CLIENT_RETRY_EXTRA_CODES"])}
    wanted = {
        PREFECT_API_URL: f"http://127.0.0.1:{port}/api",
        PREFECT_CLIENT_MAX_RETRIES: 3,
        PREFECT_CLIENT_RETRY_EXTRA_CODES: codes,
    }
    try:
        with temporary_settings(wanted):
            async with get_client() as client:
                found = await client._client.get("/health")
    finally:
        await runner.cleanup()
    assert found.status_code == 200 and next(answers, None) is None
