"""One line of policies: a candidate whose parent no longer leads is trained again, never lost."""

import asyncio
import logging
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest

from babylon.core.errors import ModelError, SupersededError, WindowError
from babylon.core.settings import Settings
from babylon.core.types import Claim
from babylon.core.windows import MAX_ATTEMPTS, WindowState, parse_window_id
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.stages.claim import claimed
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.turn import wait_for_turn
from babylon.store import Store, open_store
from babylon.store.attempts import list_attempts
from babylon.store.learning import window_learning
from babylon.store.line import take_line
from babylon.store.policies import (
    champion,
    commit_policy,
    ensure_base,
    next_batch,
    policy_of_window,
    set_verdict,
)
from babylon.store.releases import release_window, supersede
from babylon.store.routes import all_routes, commit_route, superseded
from babylon.store.windows import claim_window, get_window, release, set_state
from tests.deployments import serving, verdict
from tests.switchable_relay import SwitchableRelay

NINE, TEN, ELEVEN = (f"2025-11-14T{hour}:00" for hour in ("09", "10", "11"))
BY_HAND = ChangeRequest(author="operator", reason="by hand")


@pytest.fixture(autouse=True)
async def base(store: Store) -> None:
    await ensure_base(store, uri="/nowhere/base", base_model="tiny")


async def scored(store: Store, window_id: str, owner: str = "ada", lease_s: float = 60) -> Claim:
    window = parse_window_id(window_id)
    claim = await claim_window(store, window, owner=owner, lease_s=lease_s)
    if (await get_window(store, window.key)).state != WindowState.SCORED:
        await set_state(store, claim, WindowState.SCORED)
    return claim


async def train(store: Store, claim: Claim, parent: int) -> int:
    batch = await next_batch(store, claim.window_id)
    return await commit_policy(
        store,
        claim,
        parent_version=parent,
        kind="lora",
        uri=f"/nowhere/{batch}",
        base_model="tiny",
        batch_id=batch,
        trajectory_ids=[f"{claim.window_id}-{number}" for number in range(3)],
        metrics={},
    )


async def send_out(store: Store, claim: Claim, version: int) -> int:
    route = (await all_routes(store))[0].route_version
    return await commit_route(
        store,
        policy_version=version,
        author=claim.owner,
        reason="better",
        expected_route_version=route,
        claim=claim,
        candidate=version,
    )


async def fates(store: Store) -> dict[str, str]:
    """Window id → the one fate of its trajectories."""
    rows = await store.pool.fetch("SELECT DISTINCT window_id, fate FROM babylon.learning")
    assert len(rows) == len({row["window_id"] for row in rows})
    return {row["window_id"]: row["fate"] for row in rows}


async def test_free_trajectories_are_shown_of_each_window_that_collected_them(
    store: Store,
) -> None:
    """They are found by the window's own rows: those of all windows took seconds to sort."""
    nine, ten = await scored(store, NINE), await scored(store, TEN)
    await train(store, nine, 0)
    for claim in (nine, ten):
        await store.pool.executemany(
            "INSERT INTO babylon.collected VALUES ($1, $2)",
            [(claim.window_id, f"{NINE}-2"), (claim.window_id, "free")],
        )
    found = {
        window: [(one.trajectory_id, one.fate) for one in await window_learning(store, window)]
        for window in (NINE, TEN)
    }
    trained = [(f"{NINE}-{number}", "in a candidate") for number in range(3)]
    assert found == {NINE: [*trained, ("free", "free")], TEN: [("free", "free")]}


async def test_of_two_siblings_one_is_deployed_and_the_other_trained_again(store: Store) -> None:
    ada, bob = await scored(store, NINE), await scored(store, TEN, "bob")
    first, second = await train(store, ada, 0), await train(store, bob, 0)
    await send_out(store, ada, first)
    with pytest.raises(SupersededError, match="started from policy 0, and policy 1 leads now"):
        await send_out(store, bob, second)
    assert await serving(store) == first
    assert await fates(store) == {NINE: "in the champion's line", TEN: "in a candidate"}

    await supersede(store, bob, "policy 1 leads now")
    assert await fates(store) == {
        NINE: "in the champion's line",
        TEN: "released for training again",
    }
    row = await get_window(store, TEN)
    assert (row.state, row.batch_id, row.leased, row.attempts) == ("scored", None, False, 0)
    assert await policy_of_window(store, TEN) is None
    with pytest.raises(ModelError, match="policy 2 was trained on play that policy 2 released"):
        await replace_champion(store, checks_under(Settings()), second, BY_HAND)

    bob = await scored(store, TEN, "bob")
    third = await train(store, bob, first)
    await send_out(store, bob, third)
    assert await fates(store) == dict.fromkeys((NINE, TEN), "in the champion's line")
    endings = [(a.ending, a.began_from) for a in await list_attempts(store, [TEN])]
    assert endings == [("superseded", "claimed"), (None, "scored")]


async def test_no_policy_is_committed_whose_parent_no_longer_leads(store: Store) -> None:
    ada, bob = await scored(store, NINE), await scored(store, TEN, "bob")
    await send_out(store, ada, await train(store, ada, 0))
    with pytest.raises(SupersededError):
        await train(store, bob, 0)
    assert (await get_window(store, TEN)).state == WindowState.SCORED
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.trained") == 3


async def test_a_policy_that_serves_is_never_given_back(store: Store) -> None:
    ada = await scored(store, NINE)
    await send_out(store, ada, await train(store, ada, 0))
    with pytest.raises(WindowError, match="policy 1 is in the champion's line, so its play is not"):
        await supersede(store, ada, "mistake")


async def test_a_resumed_candidate_of_an_older_champion_goes_back_to_scored(
    store: Store, settings: Settings
) -> None:
    """The old defect: one worker resumes an older window and replaces the newer champion."""
    dead = await scored(store, NINE, lease_s=0)
    old = await train(store, dead, 0)
    ada = await scored(store, TEN)
    await send_out(store, ada, await train(store, ada, 0))
    bob = await claim_window(store, parse_window_id(NINE), owner="bob", lease_s=0)
    with pytest.raises(SupersededError):
        await deploy_checkpoint(store, settings, replace(verdict(bob), policy_version=old))
    with pytest.raises(SupersededError):
        async with claimed(store, settings.windows, parse_window_id(NINE)):
            raise SupersededError("policy 2 leads")
    assert (await get_window(store, NINE)).state == WindowState.SCORED
    attempts = await list_attempts(store, [NINE])
    assert [(a.ending, a.ended_in) for a in attempts] == [
        ("lost", "trained"),
        ("lost", "trained"),
        ("superseded", "scored"),
    ]
    assert "ada's" not in str(attempts) and "took the window over" in str(attempts[0].reason)


async def test_a_rejection_stands_whoever_leads(store: Store) -> None:
    ada, bob = await scored(store, NINE), await scored(store, TEN, "bob")
    rejected, better = await train(store, ada, 0), await train(store, bob, 0)
    await set_verdict(store, ada, rejected, {"promote": False, "reason": "worse"})
    await send_out(store, bob, better)
    assert await superseded(store, await policy_of_window(store, NINE)) is None
    await set_state(store, ada, WindowState.REJECTED)
    assert (await fates(store))[NINE] == "in a rejected candidate"


async def test_the_line_is_held_by_one_window_and_freed_by_its_end_or_its_lease(
    store: Store,
) -> None:
    ada, bob = await scored(store, NINE), await scored(store, TEN, "bob")
    assert await take_line(store, ada) is None
    assert await take_line(store, ada) is None
    before = await take_line(store, bob)
    assert before and (before.window_id, before.half_finished) == (NINE, False)
    assert before.reason == f"ada trains window {NINE}"
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now() WHERE owner = 'ada'")
    assert await take_line(store, bob) is None
    await set_state(store, bob, WindowState.FAILED, reason="loss is nan")
    assert await take_line(store, ada) is None


async def test_the_oldest_waiting_window_goes_first(store: Store) -> None:
    late, early = await scored(store, TEN), await scored(store, NINE, "bob")
    before = await take_line(store, late)
    assert before and before.reason == f"window {NINE}, of bob, is older"
    assert await take_line(store, early) is None


async def test_a_wait_outlasts_an_outage_that_is_shorter_than_the_lease(
    store: Store, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """One broken socket in hours would let the window fail, rest, and be scored again."""
    caplog.set_level(logging.INFO, "babylon")
    ada, bob = await scored(store, NINE), await scored(store, TEN, "bob")
    assert await take_line(store, ada) is None
    relay, through = SwitchableRelay.of(settings)
    often = settings.windows.model_copy(update={"lease_s": 2.0})

    async def until_said(text: str) -> None:
        async with asyncio.timeout(60):
            while text not in caplog.text:
                await asyncio.sleep(0.02)

    async with relay, open_store(through) as other:
        waits = asyncio.create_task(wait_for_turn(other, often, bob, AsyncMock()))
        await until_said("waits for its turn")
        relay.shut()
        await until_said("cannot look for its turn now")
        await relay.open()
        await set_state(store, ada, WindowState.FAILED, reason="loss is nan")
        async with asyncio.timeout(60):
            await waits
    before = await take_line(store, ada)
    assert before and before.reason == f"bob trains window {TEN}"


async def test_a_half_finished_window_goes_first_unless_it_rests(store: Store) -> None:
    half, newer = await scored(store, ELEVEN, "bob"), await scored(store, TEN)
    await train(store, half, 0)
    before = await take_line(store, newer)
    assert before and before.reason == f"bob finishes window {ELEVEN}"
    await release(store, half, "gate broke", "stopped")
    before = await take_line(store, newer)
    assert before and (before.window_id, before.half_finished) == (ELEVEN, True)
    half = await claim_window(store, parse_window_id(ELEVEN), owner="bob", lease_s=60)
    assert await take_line(store, half) is None  # it waits for no scored window
    await release(store, half, "gate broke", "failed")
    assert await take_line(store, newer) is None


async def test_a_half_finished_window_that_kills_its_workers_holds_up_nobody(store: Store) -> None:
    half, newer = await scored(store, ELEVEN, "bob"), await scored(store, TEN)
    await train(store, half, 0)
    goes_first = []
    for _ in range(3):  # each worker is killed; the first one trained the window
        await store.pool.execute("UPDATE babylon.windows SET lease_until = now() WHERE owner='bob'")
        goes_first.append(await take_line(store, newer) is not None)
        await claim_window(store, parse_window_id(ELEVEN), owner="bob", lease_s=60)
    assert goes_first == [True, True, False]
    await store.pool.execute(
        "UPDATE babylon.windows SET lease_until = now(), retry_at = now(), attempts = $1"
        " WHERE owner = 'bob'",
        MAX_ATTEMPTS,
    )
    assert await take_line(store, newer) is None


async def test_the_play_of_a_rolled_back_policy_is_released_by_hand(
    store: Store, settings: Settings
) -> None:
    ada = await scored(store, NINE)
    first = await train(store, ada, 0)
    await send_out(store, ada, first)
    await set_state(store, ada, WindowState.DEPLOYED)
    with pytest.raises(WindowError, match="is in the champion's line"):
        await release_window(store, NINE, "operator", "try again")
    bob = await scored(store, TEN, "bob")
    child = await train(store, bob, first)
    await send_out(store, bob, child)
    await set_state(store, bob, WindowState.DEPLOYED)
    await replace_champion(store, checks_under(settings), 0, BY_HAND)
    assert await fates(store) == dict.fromkeys((NINE, TEN), "in a policy rolled back")
    assert await release_window(store, NINE, "operator", "try again") == 3
    assert await fates(store) == {
        NINE: "released for training again",
        TEN: "in a policy rolled back",
    }
    with pytest.raises(ModelError, match="policy 2 was trained on play that policy 1 released"):
        await replace_champion(store, checks_under(settings), child, BY_HAND)
    assert (await champion(store))[0].policy_version == 0
    recipe = await scored(store, f"{NINE}+again")
    await send_out(store, recipe, await train(store, recipe, 0))
    assert (await fates(store))[f"{NINE}+again"] == "in the champion's line"
