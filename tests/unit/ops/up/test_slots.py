"""Slots that Prefect counts without a lease are free again after a minute."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up import slots
from babylon.ops.up.slots import look_for_unheld
from tests.ports import free_port


class Prefect:
    """The two routes of Prefect's API that are called. ``limits``: id → slots in use."""

    def __init__(self, **limits: int) -> None:
        self.limits, self.port = limits, free_port()

    async def start(self) -> web.AppRunner:
        async def found(_: web.Request) -> web.Response:
            return web.json_response(
                [{"id": i, "name": i, "active_slots": n} for i, n in self.limits.items()]
            )

        async def change(request: web.Request) -> web.Response:
            body: dict[str, Any] = await request.json()
            self.limits[request.match_info["id"]] = body["active_slots"]
            return web.Response(status=204)

        app = web.Application()
        app.router.add_post("/api/v2/concurrency_limits/filter", found)
        app.router.add_patch("/api/v2/concurrency_limits/{id}", change)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner


def lease(home: Path, limit: str, number: int) -> None:
    directory = home / "prefect" / "concurrency_leases"
    directory.mkdir(parents=True, exist_ok=True)
    about = {"id": f"{number}", "resource_ids": [limit], "metadata": {"slots": 1}}
    (directory / f"{number}.json").write_text(json.dumps(about))
    (directory / "expirations.json").write_text(json.dumps({"1": "2026-01-01T00:00:00+00:00"}))


async def test_only_slots_without_a_lease_are_freed_and_only_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect = Prefect(lost=1, held=1, both=2, free=0)
    lease(tmp_path, "held", 1)
    lease(tmp_path, "both", 2)
    api = PrefectApi(url=f"http://127.0.0.1:{prefect.port}/api")
    runner = await prefect.start()
    try:
        async with aiohttp.ClientSession() as http:
            since = await look_for_unheld(tmp_path, http, api, {})
            assert since.keys() == {"lost", "both"}
            since = await look_for_unheld(tmp_path, http, api, since)
            assert prefect.limits == {"lost": 1, "held": 1, "both": 2, "free": 0}
            monkeypatch.setattr(slots, "UNHELD_S", 0.0)
            lease(tmp_path, "lost", 3)  # it was taken just now: its lease came a moment later
            await look_for_unheld(tmp_path, http, api, since)
            assert prefect.limits == {"lost": 1, "held": 1, "both": 1, "free": 0}
            (tmp_path / "prefect" / "concurrency_leases" / "3.json").write_text("")  # a full disk
            assert await look_for_unheld(tmp_path, http, api, {})
            assert prefect.limits == {"lost": 0, "held": 1, "both": 1, "free": 0}
    finally:
        await runner.cleanup()
