"""Events that the supervisor sends to Prefect: windows, policies and data, once each."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from babylon.core.errors import DatabaseError
from babylon.core.settings import Settings
from babylon.core.windows import MAX_ATTEMPTS, WindowState, parse_window_id
from babylon.ops.prefect_env import PrefectApi, api_url
from babylon.ops.up import news
from babylon.ops.up.news import read_news, tell_news
from babylon.ops.up.supervisor import Supervisor
from babylon.store import Store, open_store
from babylon.store.approvals import answer_approval, ask_approval
from babylon.store.flow_state import read_flow_state
from babylon.store.policies import ensure_base
from babylon.store.routes import commit_route, current_route
from babylon.store.window_health import HealthAlarm, WindowHealth, store_health
from babylon.store.windows import claim_window, set_state
from babylon.tasks import retire
from tests.deployments import three_policies
from tests.integration.game import insert_real_window
from tests.switchable_relay import SwitchableRelay

LATER = parse_window_id("2025-11-14T11:00")
FIVE_HOURS_AGO = (
    "UPDATE trajectories SET \"startTime\" = (now() - interval '5 hours') AT TIME ZONE 'UTC'"
)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


async def told(store: Store, settings: Settings, since: datetime = LONG_AGO) -> dict[str, str]:
    return {
        one.event: f"{one.subject}: {one.message}"
        for one in await read_news(store, settings.windows, since)
    }


async def switch(store: Store, version: int) -> None:
    now = await current_route(store)
    await commit_route(
        store,
        policy_version=version,
        author="alice",
        reason="by hand",
        expected_route_version=now.route_version,
    )


async def test_ends_of_windows_are_told_by_kind(store: Store, settings: Settings) -> None:
    assert await told(store, settings) == {}
    for state, event, hour in (
        (WindowState.FAILED, "window.failed", 11),
        (WindowState.SKIPPED, "window.skipped", 12),
    ):
        window = parse_window_id(f"2025-11-14T{hour}:00")
        claim = await claim_window(store, window, owner="one", lease_s=60)
        await set_state(store, claim, state, reason="no judge")
        said = (await told(store, settings))[event]
        assert said == f"window.{window.key}: window {window.key} is {state}: no judge"
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert await told(store, settings, tomorrow) == {}


async def test_a_window_is_ready_at_its_first_attempt_alone(
    store: Store, settings: Settings
) -> None:
    await claim_window(store, LATER, owner="one", lease_s=0)
    (first,) = await read_news(store, settings.windows, LONG_AGO)
    await claim_window(store, LATER, owner="two", lease_s=60)
    again = await read_news(store, settings.windows, LONG_AGO)
    assert [one for one in again if one.event == "window.ready"] == [first]


async def test_a_question_is_told_while_it_waits(store: Store, settings: Settings) -> None:
    await three_policies(store)
    claim = await claim_window(store, LATER, owner="one", lease_s=60)
    await ask_approval(store, claim, 2, timedelta(hours=1))
    assert "`babylon deploy approve 2` until" in (await told(store, settings))["approval.asked"]
    await answer_approval(store, 2, True, "alice", "")
    assert "approval.asked" not in await told(store, settings)


async def test_a_window_that_is_given_up_or_lost_is_stuck(store: Store, settings: Settings) -> None:
    await claim_window(store, LATER, owner="one", lease_s=0)
    assert set(await told(store, settings)) == {"window.ready"}  # another run takes it up
    await claim_window(store, LATER, owner="two", lease_s=60)
    assert "window 2025-11-14T11:00 is lost" in (await told(store, settings))["window.stuck"]
    await store.pool.execute("DELETE FROM babylon.attempts")
    await store.pool.execute(
        "UPDATE babylon.windows SET attempts = $1, lease_until = NULL, state = 'failed'",
        MAX_ATTEMPTS,
    )
    assert "windows retry 2025-11-14T11:00" in (await told(store, settings))["window.stuck"]
    # Prefect has forgotten that it was told, and would alert at each start of a supervisor.
    await store.pool.execute("UPDATE babylon.windows SET updated_at = now() - interval '7 days'")
    assert "window.stuck" not in await told(store, settings)


async def test_promotions_and_rollbacks_are_told_apart(store: Store, settings: Settings) -> None:
    await three_policies(store)
    await switch(store, 1)
    promoted = (await told(store, settings))["model.promoted"]
    assert promoted == "policy.1: policy 1 serves in place of policy 0, by alice: by hand"
    assert "model.rolled_back" not in await told(store, settings)
    await switch(store, 0)
    back = (await told(store, settings))["model.rolled_back"]
    assert back == "policy.0: policy 0 serves in place of policy 1, by alice: by hand"


async def test_late_rows_drift_a_spent_budget_and_silence_are_told(
    store: Store, settings: Settings
) -> None:
    await store.pool.execute(
        "INSERT INTO babylon.late (trajectory_id, window_id, reason)"
        " VALUES ('a', 'w', 'written late'), ('b', 'w', 'written late')"
    )
    alarm = {"figure": "rejected", "reason": "half of the rows were rejected"}
    await store.pool.execute(
        "INSERT INTO babylon.window_health (window_id, minutes, figures, alarms)"
        " VALUES ('w', 60, '{}', $1), ('quiet', 60, '{}', '[]')",
        [alarm],
    )
    await claim_window(store, LATER, owner="one", lease_s=60)
    for level in ("full", "heuristic"):
        await store.pool.execute("UPDATE babylon.windows SET metrics = $1", {"judge_level": level})
        assert ("judge.budget" in await told(store, settings)) is (level != "full")
    found = await told(store, settings)
    assert found["data.late"].startswith("window.w: 2 rows of window w")
    assert found["data.drift"].endswith("unlike those before it: half of the rows were rejected")
    assert "data.stale" not in found
    await insert_real_window(store)
    await store.pool.execute(FIVE_HOURS_AGO)
    assert "no play began since" in (await told(store, settings))["data.stale"]


async def test_an_unusual_window_is_told_once_for_the_figures_that_alarm(
    store: Store, settings: Settings
) -> None:
    keys = []
    claim = await claim_window(store, LATER, owner="one", lease_s=60)
    for agents, figures in ((1, ["agents"]), (2, ["agents"]), (2, ["agents", "rejected"])):
        alarms = [HealthAlarm(figure=name, reason=f"{agents} agents") for name in figures]
        health = WindowHealth(window_id=LATER.key, minutes=60, figures={}, alarms=tuple(alarms))
        await store_health(store, claim, health)
        keys += [
            one.key
            for one in await read_news(store, settings.windows, LONG_AGO)
            if one.event == "data.drift"
        ]
    assert keys[0] == keys[1] != keys[2]


@pytest.fixture
async def prefect() -> AsyncIterator[tuple[PrefectApi, list[dict[str, Any]]]]:
    """The route of Prefect's API that takes events. Its first answer is an error."""
    heard: list[dict[str, Any]] = []
    asked = []

    async def find(request: web.Request) -> web.Response:
        ids = (await request.json())["filter"]["id"]["id"]
        return web.json_response({"events": [one for one in heard if one["id"] in ids]})

    async def take(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) == 1:
            return web.Response(status=503)
        heard.extend(asked[-1])
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/api/events", take)
    application.router.add_post("/api/events/filter", find)
    async with TestServer(application, host="127.0.0.1") as server:
        yield PrefectApi(url=api_url(server.port or 0)), heard


async def test_news_reach_prefect_once_although_it_was_away_and_the_supervisor_was_restarted(
    store: Store,
    settings: Settings,
    prefect: tuple[PrefectApi, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news, "LOOK_S", 0.02)
    monkeypatch.setattr(news, "SETTLE_S", 0)
    api, heard = prefect
    endings = {LATER: WindowState.FAILED, parse_window_id("2025-11-14T12:00"): WindowState.SKIPPED}
    for window, state in endings.items():
        claim = await claim_window(store, window, owner="one", lease_s=60)
        await set_state(store, claim, state, reason="no judge")
        async with aiohttp.ClientSession() as http, asyncio.timeout(30):
            telling = asyncio.create_task(
                tell_news(partial(open_store, settings), settings.windows, http, api)
            )
            while f"babylon.window.{state}" not in [event["event"] for event in heard]:
                await asyncio.sleep(0.02)
            telling.cancel()
    told = sorted((event["resource"]["prefect.resource.id"], event["event"]) for event in heard)
    assert told == [
        (f"babylon.window.{window.key}", f"babylon.window.{event}")
        for window, state in endings.items()
        for event in sorted(("ready", state))
    ]


async def test_two_workers_tell_each_event_once_although_prefect_writes_it_later(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "LOOK_S", 0.02)
    monkeypatch.setattr(news, "SETTLE_S", 0.6)
    sent, written, asked_again = list[str](), list[str](), asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        ids = [event["id"] for event in await request.json()]
        sent.extend(ids)
        # The loop that runs both tellers runs this timer before the end of their longer wait.
        asyncio.get_running_loop().call_later(0.2, written.extend, ids)
        return web.Response(status=204)

    async def find(request: web.Request) -> web.Response:
        ids = (await request.json())["filter"]["id"]["id"]
        if written:
            asked_again.set()
        return web.json_response({"events": [{"id": one} for one in written if one in ids]})

    application = web.Application()
    application.router.add_post("/api/events", take)
    application.router.add_post("/api/events/filter", find)
    await claim_window(store, LATER, owner="one", lease_s=60)
    async with (
        TestServer(application, host="127.0.0.1") as server,
        aiohttp.ClientSession() as http,
        asyncio.timeout(30),
    ):
        api, opening = PrefectApi(url=api_url(server.port or 0)), partial(open_store, settings)
        workers = [
            asyncio.create_task(tell_news(opening, settings.windows, http, api)) for _ in range(2)
        ]
        await asked_again.wait()  # by the worker that did not tell
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    assert len(sent) == 1


async def test_a_window_that_changes_again_hours_later_alerts_once(
    store: Store,
    settings: Settings,
    prefect: tuple[PrefectApi, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news, "LOOK_S", 0.02)
    monkeypatch.setattr(news, "SETTLE_S", 0)
    api, heard = prefect
    await claim_window(store, LATER, owner="one", lease_s=60)
    level = {"judge_level": "heuristic"}
    # The news of another window's begin shows that a look has seen the change.
    changes = ("now()", "now() - interval '2 hours'", "now()")
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        opening = partial(open_store, settings)
        telling = asyncio.create_task(tell_news(opening, settings.windows, http, api))
        for hour, moment in enumerate(changes, start=12):
            await store.pool.execute(
                f"UPDATE babylon.windows SET metrics = $1, updated_at = {moment}"
                " WHERE window_id = $2",
                level,
                LATER.key,
            )
            other = parse_window_id(f"2025-11-14T{hour}:00")
            await claim_window(store, other, owner="one", lease_s=60)
            while f"babylon.window.{other.key}" not in [
                event["resource"]["prefect.resource.id"] for event in heard
            ]:
                await asyncio.sleep(0.02)
        telling.cancel()
    assert [event["event"] for event in heard].count("babylon.judge.budget") == 1


async def test_an_outage_of_the_game_hides_no_news_and_stops_neither_start_nor_retention(
    blank_database_url: str, store: Store, settings: Settings
) -> None:
    game_settings = settings.replace(database={"url": SecretStr(blank_database_url)})
    async with open_store(game_settings, migrate=True) as game:
        await insert_real_window(game)
        await game.pool.execute(FIVE_HOURS_AGO)
    relay, there = SwitchableRelay.of(game_settings)
    apart = settings.replace(
        database={"game_url": there.database.url},
        prefect={"api_url": "http://127.0.0.1:1/api"},  # no database for a server of our own
    )
    await ensure_base(store, uri="file:///base", base_model="tiny")
    claim = await claim_window(store, LATER, owner="one", lease_s=60)
    await set_state(store, claim, WindowState.FAILED, reason="no judge")
    async with relay, open_store(apart) as opened:
        assert "data.stale" in await told(opened, apart)
        relay.shut()
        assert "window.failed" in await told(opened, apart)
        flow = await read_flow_state(opened)
        assert (flow.windows, flow.newest_play) == ({"failed": 1}, None)
        with pytest.raises(DatabaseError, match="correct GAME_DATABASE_URL"):
            async with open_store(apart):
                pass
        assert await retire.retire.fn(apart) == ()
        await Supervisor(apart)._prepare()
        async with Supervisor(apart)._opening() as without:
            assert "window.failed" in await told(without, apart)
            await relay.open()
            assert "data.stale" in await told(without, apart)
