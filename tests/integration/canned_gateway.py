"""A gateway over an engine that gives canned answers, both in this process."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from openai import AsyncOpenAI

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.policies import ensure_base
from tests.integration.test_serving import on_uvicorn, running_gateway, until_healthy

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Canned:
    """A running gateway; ``key`` is the local one."""

    url: str
    port: int
    store: Store
    key: str

    def client(self, key: str | None = None) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0)

    async def rows(self) -> list[asyncpg.Record]:
        await wait_until_recorded(self.store, timeout_s=60, silent_s=60)  # it may be starved
        return await self.store.pool.fetch("SELECT * FROM babylon.calls ORDER BY started_at")


@asynccontextmanager
async def canned_gateway(
    store: Store, settings: Settings, engine: Any, gateway_id: str = "test"
) -> AsyncIterator[Canned]:
    """``engine`` is an ASGI application."""
    await ensure_base(store, uri="/nowhere", base_model="canned")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        engine_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            on_uvicorn(engine, listener),
            running_gateway(store, settings, engine_url, gateway_id) as url,
        ):
            await until_healthy(url)
            port = int(url.rpartition(":")[2])
            yield Canned(url, port, store, str(local_key(settings.home.root)))
