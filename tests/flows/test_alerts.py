"""Events and alerts as Prefect's own server takes them."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import Automation

from babylon.ops.up.alerts import BAD_NEWS, ENDS, automations
from babylon.ops.up.news import _EVENTS, NewsItem


async def test_prefect_takes_the_automations_and_reads_them_back() -> None:
    async with get_client() as client:
        made = [
            await client._client.post("/automations/", json=one)
            for one in automations(str(uuid4()), 60)
        ]
        assert [one.status_code for one in made] == [201, 201, 201], [one.text for one in made]
        kept = [Automation.model_validate(one.json()) for one in made]
        for one in kept:
            await client.delete_automation(one.id)
    assert [one.enabled for one in kept] == [True] * 3
    assert {one.actions[0].type for one in kept} == {"send-notification"}


@pytest.mark.parametrize(("minutes", "hours"), [(15, 2), (60, 2), (24 * 60, 48)])
def test_long_windows_are_missed_later(minutes: int, hours: int) -> None:
    trigger = automations("block", minutes)[1]["trigger"]
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
