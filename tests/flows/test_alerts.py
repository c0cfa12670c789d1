"""Events and alerts as Prefect's own server takes them."""

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import PrefectClient, get_client
from prefect.events.schemas.automations import Automation

from babylon.core.errors import ServingError
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up import alerts
from babylon.ops.up.alerts import BAD_NEWS, ENDS, automations, set_up_alerts
from babylon.ops.up.news import _EVENTS, NewsItem

BAD = "babylon: bad news"
NO_WINDOW = "babylon: no new window"


async def test_prefect_takes_the_automations_and_reads_them_back() -> None:
    async with get_client() as client:
        made = [
            await client._client.post("/automations/", json=one)
            for one in automations("slack-webhook/x", str(uuid4()), 60)
        ]
        assert [one.status_code for one in made] == [201, 201, 201], [one.text for one in made]
        kept = [Automation.model_validate(one.json()) for one in made]
        for one in kept:
            await client.delete_automation(one.id)
    assert [one.enabled for one in kept] == [True] * 3
    assert {one.actions[0].type for one in kept} == {"send-notification"}


async def test_another_block_moves_the_automations_and_keeps_a_persons_change() -> None:
    async with get_client() as client, aiohttp.ClientSession() as http:
        api = PrefectApi(url=str(client.api_url).rstrip("/"))
        for name in ("first", "second"):
            block = CustomWebhookNotificationBlock(name=name, url="http://127.0.0.1:1/")
            await block.save(name, overwrite=True)
        try:
            await set_up_alerts(http, api, "custom-webhook/first", 60)
            made = await _ours(client)
            changed = {**made[NO_WINDOW]["trigger"], "within": 60}
            await _change(client, made[NO_WINDOW], trigger=changed)
            await set_up_alerts(http, api, "custom-webhook/second", 60)
            moved = await _ours(client)
        finally:
            for one in (await _ours(client)).values():
                await client.delete_automation(one["id"])
    assert {one["id"] for one in moved.values()} == {one["id"] for one in made.values()}
    before, after = (_blocks(found) for found in (made, moved))
    assert len(before) == len(after) == 1 and before != after
    assert moved[NO_WINDOW]["trigger"]["within"] == 60


async def test_a_trigger_of_several_parts_that_a_person_made_stays() -> None:
    async with get_client() as client, aiohttp.ClientSession() as http:
        api = PrefectApi(url=str(client.api_url).rstrip("/"))
        block = CustomWebhookNotificationBlock(name="parts", url="http://127.0.0.1:1/")
        await block.save("parts", overwrite=True)
        try:
            await set_up_alerts(http, api, "custom-webhook/parts", 60)
            made = await _ours(client)
            event = {**made[BAD]["trigger"], "id": str(uuid4())}
            compound = {"type": "compound", "require": "any", "within": None, "triggers": [event]}
            await _change(client, made[BAD], trigger=compound)
            await set_up_alerts(http, api, "custom-webhook/parts", 60)
            left = await _ours(client)
        finally:
            for one in (await _ours(client)).values():
                await client.delete_automation(one["id"])
    assert left[BAD]["trigger"]["type"] == "compound"
    assert left[BAD]["description"].endswith("changed by hand")


async def test_automations_that_nobody_changed_follow_the_settings_the_version_and_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with get_client() as client, aiohttp.ClientSession() as http:
        api = PrefectApi(url=str(client.api_url).rstrip("/"))
        block = CustomWebhookNotificationBlock(name="again", url="http://127.0.0.1:1/")
        first = await block.save("again", overwrite=True)
        try:
            with monkeypatch.context() as older:
                older.setattr(alerts, "BAD_NEWS", BAD_NEWS[1:])
                await set_up_alerts(http, api, "custom-webhook/again", 60)
            await client.delete_block_document(first)
            second = await block.save("again")
            await set_up_alerts(http, api, "custom-webhook/again", 240)
            made = await _ours(client)
            events = made[BAD]["trigger"]["expect"]
            hours = made[NO_WINDOW]["trigger"]["within"] / 3600, made[NO_WINDOW]["actions"][0]
            changed = {**made[BAD]["trigger"], "expect": events[1:]}
            await _change(client, made[BAD], trigger=changed)
            for minutes in (60, 240, 60):
                await set_up_alerts(http, api, "custom-webhook/again", minutes)
            left = await _ours(client)
        finally:
            for one in (await _ours(client)).values():
                await client.delete_automation(one["id"])
    assert _blocks(made) == {str(second)} != {str(first)}
    assert sorted(events) == sorted(f"babylon.{one}" for one in BAD_NEWS)
    assert (hours[0], hours[1]["body"]) == (8, "no window became ready for 8 hours")
    assert sorted(left[BAD]["trigger"]["expect"]) == sorted(events[1:])
    assert left[BAD]["description"].endswith("changed by hand")
    assert left[NO_WINDOW]["trigger"]["within"] == 7200


async def test_a_block_that_is_not_there_is_named() -> None:
    async with get_client() as client, aiohttp.ClientSession() as http:
        api = PrefectApi(url=str(client.api_url).rstrip("/"))
        with pytest.raises(ServingError, match=r"custom-webhook/none.*make that block"):
            await set_up_alerts(http, api, "custom-webhook/none", 60)


async def _change(client: PrefectClient, automation: dict[str, Any], **fields: Any) -> None:
    kept = {name: automation[name] for name in ("name", "description", "trigger", "actions")}
    await client._client.put(f"/automations/{automation['id']}", json=kept | fields)


async def _ours(client: PrefectClient) -> dict[str, dict[str, Any]]:
    found = (await client._client.post("/automations/filter", json={})).json()
    return {one["name"]: one for one in found if "ALERT_BLOCK" in one["description"]}


def _blocks(found: dict[str, dict[str, Any]]) -> set[str]:
    return {action["block_document_id"] for one in found.values() for action in one["actions"]}


@pytest.mark.parametrize(("minutes", "hours"), [(15, 2), (60, 2), (24 * 60, 48)])
def test_long_windows_are_missed_later(minutes: int, hours: int) -> None:
    trigger = automations("slack-webhook/x", "id", minutes)[1]["trigger"]
    assert (trigger["expect"], trigger["within"]) == (["babylon.window.ready"], hours * 3600)


async def test_prefect_takes_the_events() -> None:
    news = NewsItem(
        event="window.failed", subject="window.x", mark="1", at=datetime.now(UTC), message="m"
    )
    async with get_client() as client:
        answer = await client._client.post("/events", json=[news.body()])
        known = await client._client.post(
            "/events/filter", json={"filter": {"id": {"id": [str(uuid4())]}}}
        )
    assert answer.status_code == 204
    assert known.json()["events"] == []


def test_every_event_that_an_alert_waits_for_is_told_by_somebody() -> None:
    told = {*_EVENTS.values(), "model.rolled_back", "judge.budget", "data.late"}
    assert {*BAD_NEWS, *ENDS} <= told | {"data.stale", "data.drift", "approval.asked"}
