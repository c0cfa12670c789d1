"""A window whose worker died: seen as lost, and handed to another run once."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prefect.utilities.callables import parameter_schema

from babylon.core.windows import JUDGED_AGAIN, WindowState, parse_window_id
from babylon.flows.train_window import train_window
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up import take_up, work_in_hand
from babylon.ops.up.take_up import DEPLOYMENT, _take_up
from babylon.store import Store
from babylon.store.windows import claim_window, get_window, lost_windows, release

WINDOW = "2025-11-14T09:00"
PAST_WINDOW = "2025-11-14T08:00"
BY_HAND = {
    "window_id": "2025-11-14T06:00",
    "overrides": {"training": {"learning_rate": 1e-3, "seed": 5}, "windows": {"minutes": 5}},
    "blocks": ["babylon-judge/strict"],
    "placement": "inline",
}
OF_RECIPE = {
    "window_id": "2025-11-14T05:00",
    "overrides": {"windows": {"recipe": "short"}, "quality": {"min_actions": 1}},
}


@pytest.fixture
async def prefect() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Prefect's API as far as the supervisor calls it, and the runs that it was asked for."""
    asked: list[dict[str, Any]] = []

    async def named(request: web.Request) -> web.Response:
        assert request.match_info["name"] == DEPLOYMENT
        schema = parameter_schema(train_window.fn).model_dump()
        return web.json_response({"id": "one", "parameter_openapi_schema": schema})

    async def create(request: web.Request) -> web.Response:
        asked.append(await request.json())
        died = asked[-1]["idempotency_key"].endswith(f"{PAST_WINDOW}/1/0")
        return web.json_response({"state": {"type": "CRASHED" if died else "SCHEDULED"}})

    async def dead(request: web.Request) -> web.Response:
        names = (await request.json())["flow_runs"]["name"]["any_"]
        ran = [one for one in (BY_HAND, OF_RECIPE) if one["window_id"] in names]
        return web.json_response([{"state_type": "CRASHED", "parameters": one} for one in ran])

    app = web.Application()
    app.router.add_post("/api/flow_runs/filter", dead)
    app.router.add_get("/api/deployments/name/{name:.*}", named)
    app.router.add_post("/api/deployments/one/create_flow_run", create)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/api", asked
    await runner.cleanup()


async def test_a_lost_window_is_taken_up_and_a_held_or_returned_one_is_not(
    store: Store, prefect: tuple[str, list[dict[str, Any]]]
) -> None:
    url, asked = prefect
    api = PrefectApi(url=url)
    window = parse_window_id(WINDOW)
    claim = await claim_window(store, window, owner="box:1:a", lease_s=600)
    async with aiohttp.ClientSession() as http:
        await _take_up(store, http, api)
        assert asked == []
        assert [one.lease for one in await work_in_hand(store)] == ["held"]

        await store.pool.execute(
            "UPDATE babylon.windows SET lease_until = now() - $1::interval", timedelta(seconds=1)
        )
        assert [one.lease for one in await work_in_hand(store)] == ["lost"]
        await _take_up(store, http, api)
        await _take_up(store, http, api)
        assert [run["parameters"]["window_id"] for run in asked] == [WINDOW] * 2
        # Prefect starts one run for a key, however often it is asked.
        assert {run["idempotency_key"] for run in asked} == {f"take-up/{WINDOW}/1/0"}

        await release(store, claim, "stopped by a signal", "stopped")
        assert await lost_windows(store) == []
        assert await work_in_hand(store) == []


async def test_a_window_is_taken_up_with_the_settings_of_the_dead_run(
    store: Store, prefect: tuple[str, list[dict[str, Any]]]
) -> None:
    """Except for those that the deployment's form refuses, as of a run by a program."""
    url, asked = prefect
    await claim_window(
        store, parse_window_id(str(BY_HAND["window_id"])), owner="box:1:a", lease_s=0
    )
    async with aiohttp.ClientSession() as http:
        await _take_up(store, http, PrefectApi(url=url))
    (run,) = asked
    assert run["parameters"]["overrides"] == {
        "training": {"learning_rate": 1e-3},
        "windows": {"minutes": 60},
    }
    assert run["parameters"]["blocks"] == ["babylon-judge/strict"]
    assert "placement" not in run["parameters"]  # the deployment's own


@pytest.mark.parametrize(
    ("window_id", "quality"),
    [(f"{OF_RECIPE['window_id']}+short", {"min_actions": 1}), (OF_RECIPE["window_id"], None)],
)
async def test_a_recipe_is_taken_up_with_the_settings_of_its_own_run(
    store: Store,
    prefect: tuple[str, list[dict[str, Any]]],
    window_id: str,
    quality: dict[str, int] | None,
) -> None:
    """The run is named after the window, and the recipe trains a window once."""
    url, asked = prefect
    await claim_window(store, parse_window_id(window_id), owner="box:1:a", lease_s=0)
    async with aiohttp.ClientSession() as http:
        await _take_up(store, http, PrefectApi(url=url))
    (run,) = asked
    assert run["parameters"]["window_id"] == window_id
    assert run["parameters"]["overrides"].get("quality") == quality


async def test_a_window_that_is_only_judged_again_is_never_trained(
    store: Store, prefect: tuple[str, list[dict[str, Any]]]
) -> None:
    url, asked = prefect
    judged = parse_window_id(f"{WINDOW}+{JUDGED_AGAIN}")
    await claim_window(store, judged, owner="box:1:a", lease_s=0)
    async with aiohttp.ClientSession() as http:
        await _take_up(store, http, PrefectApi(url=url))
    assert asked == [] and await lost_windows(store) == []
    row = await get_window(store, judged.key)
    assert row is not None and row.state == WindowState.SKIPPED
    assert (row.reason or "").endswith(f"`babylon judge again --window {WINDOW}`")
    await claim_window(store, judged, owner="box:2:b", lease_s=60)  # it is judged once more


async def test_a_window_that_cannot_be_taken_up_and_a_run_that_died_stop_no_other(
    store: Store, prefect: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = prefect
    for name in ("2025-11-14T07:00", PAST_WINDOW, WINDOW):
        await claim_window(store, parse_window_id(name), owner="box:1:a", lease_s=600)
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now() - interval '1 s'")
    await store.pool.execute("DELETE FROM babylon.attempts WHERE window_id = $1", WINDOW)  # retired
    end_dead_run = take_up._end_dead_run

    async def failing(*given: Any) -> dict[str, Any]:
        if given[-1].window_id == "2025-11-14T07:00":
            raise ValueError("broken")
        return await end_dead_run(*given)

    monkeypatch.setattr(take_up, "_end_dead_run", failing)
    async with aiohttp.ClientSession() as http:
        await _take_up(store, http, PrefectApi(url=url))
    keys = [run["idempotency_key"] for run in asked]
    past = [f"take-up/{PAST_WINDOW}/1/{again}" for again in (0, 1)]  # the first run died
    assert sorted(keys) == [*past, f"take-up/{WINDOW}/1/0"]
