"""A change needs half of the gateways, and the others are not waited for."""

import asyncio
from dataclasses import replace
from typing import NoReturn

import pytest

from babylon.core.errors import ServingError
from babylon.deployment.change import ChangeRequest
from babylon.deployment.replace import replace_champion
from babylon.store import Store, gateways
from babylon.store.gateways import (
    GatewayRow,
    announce_gateway,
    gateway_runs,
    live_gateways,
    remove_gateway,
    remove_old_gateways,
    wait_for_acks,
    wait_until_loaded,
)
from babylon.store.policies import ensure_base
from babylon.store.proposals import proposed
from babylon.store.quarantine import (
    end_quarantine,
    probe_keys,
    quarantine,
    quarantined,
)

WAIT_S = 20.0


def row(name: str, route: int = 1, **state: object) -> GatewayRow:
    made = GatewayRow(gateway_id=name, url=f"http://{name}:8000", route_version=route)
    return replace(made, **state)  # type: ignore[arg-type]


@pytest.fixture
async def routed(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(gateways, "FOLLOW_S", 0.2)
    await ensure_base(store, uri="Qwen/tiny", base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'full', 'Qwen/other', 'tiny')"
    )
    return store


async def test_a_gateway_that_does_not_follow_is_quarantined_until_it_does(routed: Store) -> None:
    await announce_gateway(routed, row("east", 2))
    await announce_gateway(routed, row("west", 1))
    await routed.pool.execute(
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
        " VALUES (2, 0, 'test', 'again')"
    )
    assert await wait_for_acks(routed, 2, 0, WAIT_S) == ("east",)
    assert await quarantined(routed) == {"west": "it did not serve route 2: no answer in time"}
    shown = {one.gateway_id: one.quarantined for one in await live_gateways(routed)}
    assert shown == {"east": None, "west": "it did not serve route 2: no answer in time"}
    assert await wait_for_acks(routed, 2, 0, WAIT_S) == ("east",)  # at once
    await end_quarantine(routed, "west")
    assert [*await quarantined(routed)] == ["west"]  # it is still behind
    await announce_gateway(routed, row("west", 2))
    await end_quarantine(routed, "west")
    assert await quarantined(routed) == {}
    assert await wait_for_acks(routed, 2, 0, WAIT_S) == ("east", "west")


async def fall_silent(store: Store, name: str, seconds: float) -> None:
    await store.pool.execute(
        "UPDATE babylon.gateways SET seen_at = now() - $2 * interval '1 s' WHERE gateway_id = $1",
        name,
        seconds,
    )


async def test_gateways_that_a_stalled_database_silenced_are_waited_for(routed: Store) -> None:
    assert not await gateway_runs(routed)
    await announce_gateway(routed, row("east"))
    await fall_silent(routed, "east", 60)
    waiting = asyncio.create_task(gateway_runs(routed))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await announce_gateway(routed, row("east"))
    assert await waiting


async def test_nothing_goes_live_unchecked_if_gateways_that_served_stay_away(
    routed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await announce_gateway(routed, row("east"))
    await fall_silent(routed, "east", 60)
    order = ChangeRequest(author="test", reason="test")

    async def never(*_: object) -> NoReturn:
        raise AssertionError("there is nobody whom the checks could ask")

    changing = asyncio.create_task(replace_champion(routed, never, 1, order))
    await asyncio.sleep(0.1)
    assert not changing.done()
    await fall_silent(routed, "east", gateways.SILENT_S + 1)
    with pytest.raises(ServingError, match="east at http://east:8000; start one"):
        await changing
    assert await routed.pool.fetchval("SELECT max(policy_version) FROM babylon.routes") == 0
    made = await replace_champion(routed, never, 1, order)  # nobody has served for long
    assert made.policy_version == 1


async def test_rows_of_gateways_that_ended_long_ago_go(routed: Store) -> None:
    for name, silent_s in (("east", 60.0), ("west", 90_000.0)):
        await announce_gateway(routed, row(name), probe_key="secret")
        await fall_silent(routed, name, silent_s)
    await remove_old_gateways(routed)
    assert [one.gateway_id for one in await live_gateways(routed, 1e6)] == ["east"]
    await remove_gateway(routed, "east")


async def test_the_quarantined_count_as_gateways(routed: Store) -> None:
    for name in ("north", "east", "south", "west"):
        await announce_gateway(routed, row(name, 1))
    await quarantine(routed, {"north": "away", "east": "away"})
    await announce_gateway(routed, row("south", 2))
    with pytest.raises(ServingError, match=r"(?s)east.*north"):  # one of four is not half
        await wait_for_acks(routed, 2, 0, 0.5)
    await announce_gateway(routed, row("west", 2))
    assert await wait_for_acks(routed, 2, 0, WAIT_S) == ("south", "west")


async def test_refusals_of_few_do_not_stop_a_change_and_those_of_most_do(routed: Store) -> None:
    refuses = {"refusals": {"1": "no room"}, "proposals_read": 99}
    async with proposed(routed, 1, "test"):
        await announce_gateway(routed, row("a", loaded=[0, 1]))
        await announce_gateway(routed, row("b", loaded=[0], **refuses))
        found = await wait_until_loaded(routed, 1, WAIT_S)
        assert [one.gateway_id for one in found] == ["a"]
        assert "no room" in (await quarantined(routed))["b"]
        await announce_gateway(routed, row("b", loaded=[0], **refuses))
        await routed.pool.execute("DELETE FROM babylon.quarantine")
        await announce_gateway(routed, row("c", loaded=[0], **refuses))
        with pytest.raises(ServingError, match="cannot hold policy 1: no room"):
            await wait_until_loaded(routed, 1, WAIT_S)


async def test_a_single_gateway_is_waited_for(routed: Store) -> None:
    await announce_gateway(routed, row("only", 1))
    waiting = asyncio.create_task(wait_for_acks(routed, 2, 0, WAIT_S))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await announce_gateway(routed, row("only", 2))
    assert await waiting == ("only",)


async def test_the_key_of_a_gateway_goes_with_it(routed: Store) -> None:
    await announce_gateway(routed, row("old"))
    for secret in ("first", "secret", "secret"):
        await announce_gateway(routed, row("east"), secret)
    assert await probe_keys(routed, ["east", "old"]) == {"east": "secret"}
    await gateways.remove_gateway(routed, "east")
    assert await probe_keys(routed, ["east"]) == {}
    await announce_gateway(routed, row("east"), "secret")
    assert await probe_keys(routed, ["east"]) == {"east": "secret"}
