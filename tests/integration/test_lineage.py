"""OpenLineage events of windows, sent by the real client to a real HTTP receiver."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from babylon.core.settings import Settings, TrackingSettings
from babylon.core.windows import WindowState, parse_window_id
from babylon.ops.up import lineage
from babylon.ops.up.lineage import tell_lineage
from babylon.store import Store, open_store
from babylon.store.windows import claim_window, set_state
from tests.deployments import three_policies

FAILED, WINDOW = "2025-11-20T08:00", "2025-11-14T10:00"  # the second trained policy 2


@asynccontextmanager
async def receiver(
    refuses: int, status: int = 403
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A receiver that is out of order for the first requests, and the events that it took."""
    took: list[dict[str, Any]] = []
    left = refuses

    async def take(request: web.Request) -> web.Response:
        nonlocal left
        assert request.headers["Authorization"] == "Bearer catalogue-key"
        if left:
            left -= 1
            return web.Response(status=status)
        event = await request.json()
        if event["run"]["facets"]["nominalTime"]["nominalStartTime"][:16] in (FAILED, WINDOW):
            took.append(event)
        return web.Response(status=201)

    app = web.Application()
    app.router.add_post("/api/v1/lineage", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", took
    await runner.cleanup()


async def test_a_refusal_is_logged_without_the_password_of_the_address(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lineage, "LOOK_S", 0.05)
    await claim_window(store, parse_window_id(FAILED), owner="a", lease_s=60)
    async with receiver(refuses=100) as (url, _):
        named = url.replace("://", "://me:sk-secret@")
        tracking = TrackingSettings(lineage_url=named, lineage_key=SecretStr("catalogue-key"))
        telling = asyncio.create_task(
            tell_lineage(lambda: open_store(settings), tracking, "babylon", None)
        )
        async with asyncio.timeout(60):
            while "cannot be sent" not in caplog.text:
                await asyncio.sleep(0.02)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert "://********@127.0.0.1" in caplog.text and "sk-secret" not in caplog.text


async def test_an_event_that_is_refused_for_good_blocks_no_other(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "LOOK_S", 0.05)
    claim = await claim_window(store, parse_window_id(FAILED), owner="a", lease_s=60)
    await set_state(store, claim, WindowState.FAILED, reason="no agents")
    async with receiver(refuses=1, status=422) as (url, took):
        tracking = TrackingSettings(lineage_url=url, lineage_key=SecretStr("catalogue-key"))
        telling = asyncio.create_task(
            tell_lineage(lambda: open_store(settings), tracking, "babylon", None)
        )
        async with asyncio.timeout(60):
            while not took:
                await asyncio.sleep(0.02)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert [one["eventType"] for one in took] == ["FAIL"]  # and not the START, which was refused


async def test_each_claim_has_a_begin_and_an_end_with_play_in_and_the_policy_out(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "LOOK_S", 0.05)
    await three_policies(store)
    claim = await claim_window(store, parse_window_id(FAILED), owner="a", lease_s=60)
    await set_state(store, claim, WindowState.FAILED, reason="no agents")
    async with receiver(refuses=2) as (url, took):
        tracking = TrackingSettings(lineage_url=url, lineage_key=SecretStr("catalogue-key"))
        game = SecretStr("postgresql://reader@game-db:5432/game")

        def opening() -> Any:
            return open_store(settings)

        telling = asyncio.create_task(tell_lineage(opening, tracking, "babylon", game))
        async with asyncio.timeout(240):
            while len(took) < 3:
                await asyncio.sleep(0.02)
            await store.pool.execute(
                "UPDATE babylon.attempts SET ended_at = now(), ending = 'deployed' WHERE"
                " window_id = $1",
                WINDOW,
            )
            while len(took) < 4:
                await asyncio.sleep(0.02)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert [one["eventType"] for one in took] == ["START", "START", "FAIL", "COMPLETE"]
    begun, _, failed, done = took
    assert failed["run"]["runId"] == took[1]["run"]["runId"] != done["run"]["runId"]
    assert begun["run"]["runId"] == done["run"]["runId"]
    assert failed["run"]["facets"]["errorMessage"]["message"] == "failed: no agents"
    assert done["run"]["facets"]["nominalTime"]["nominalStartTime"] == "2025-11-14T10:00:00+00:00"
    assert done["job"] == {"namespace": "babylon", "name": "train-window", "facets": {}}
    plays, policy = done["inputs"][:2], done["inputs"][2]
    assert {one["namespace"].rpartition(":")[0] for one in plays} == {"postgres://game-db"}
    assert [one["name"].split(".", 1)[1] for one in plays] == [
        "public.trajectories",
        "babylon.calls",
    ]
    (made,) = done["outputs"]
    assert made["name"] == policy["name"] == "policy/babylon"
    versions = [one["facets"]["version"]["datasetVersion"] for one in (policy, made)]
    assert versions == ["0", "2"]
