"""Policies, routes, gateways and recorded calls, on a real Postgres."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from babylon.core.errors import AlreadyTrainedError, ModelError, RouteConflictError, ServingError
from babylon.core.types import Claim
from babylon.core.windows import Window, WindowState
from babylon.store import Store
from babylon.store.calls import CALL_COLUMNS, RecordedCall, insert_calls
from babylon.store.gateways import (
    GatewayRow,
    announce_gateway,
    live_gateways,
    remove_gateway,
    wait_for_acks,
)
from babylon.store.policies import (
    champion,
    commit_policy,
    ensure_base,
    get_policy,
    list_policies,
    policies_about,
    policy_of_batch,
    set_verdict,
)
from babylon.store.routes import (
    CHANNEL,
    all_routes,
    champions_of,
    commit_route,
    current_route,
    list_routes,
    previous_champion,
)
from babylon.store.scores import StoredScore, replace_scores
from babylon.store.windows import claim_window, get_window
from tests.unit.serving.gateway.calls import call

WINDOW = Window(datetime(2025, 11, 14, 9, tzinfo=UTC))
CALL = call(1)


def gateway(gateway_id: str, url: str, route_version: int) -> GatewayRow:
    return GatewayRow(gateway_id=gateway_id, url=url, route_version=route_version)


async def _commit(store: Store, claim: Claim, *, batch: str, trajectories: list[str]) -> int:
    return await commit_policy(
        store,
        claim,
        parent_version=0,
        kind="lora",
        uri=f"file:///checkpoints/{batch}",
        base_model="tiny",
        batch_id=batch,
        trajectory_ids=trajectories,
        metrics={"training_loss": 0.25, "avg_reward": 0.5},
    )


async def _trajectory(store: Store, trajectory_id: str) -> None:
    await store.pool.execute('INSERT INTO "User" (id) VALUES ($1)', f"agent of {trajectory_id}")
    await store.pool.execute(
        'INSERT INTO trajectories (id, "trajectoryId", "agentId", "startTime", "endTime",'
        ' "durationMs", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson",'
        ' "totalReward", "episodeLength", "finalStatus", "updatedAt")'
        " VALUES ($1, $1, $2, now(), now(), 0, '[]', '{}', '{}', '{}', 0, 0, 'completed', now())",
        trajectory_id,
        f"agent of {trajectory_id}",
    )


async def test_base_policy_is_made_once_and_routed(store: Store) -> None:
    with pytest.raises(ModelError, match="babylon model init"):
        await champion(store)
    with pytest.raises(ServingError, match="babylon model init"):
        await current_route(store)
    with pytest.raises(ModelError, match="babylon model init"):
        await get_policy(store, 0)
    await asyncio.gather(*(ensure_base(store, uri="file:///m", base_model="tiny") for _ in "ab"))
    await ensure_base(store, uri="file:///other", base_model="other")
    policy, route_version = await champion(store)
    assert (policy.policy_version, policy.kind, policy.uri, route_version) == (
        0, "base", "/m", 1,
    )  # fmt: skip
    assert len(await list_policies(store)) == 1
    with pytest.raises(ModelError, match="version 7: see `babylon model list`"):
        await get_policy(store, 7)


async def test_a_policy_its_trajectories_and_the_window_commit_together(store: Store) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    await _trajectory(store, "t1")
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    await replace_scores(store, claim, [StoredScore(trajectory_id="t1", scorer="x", score=0.5)])
    assert await policy_of_batch(store, "b1") is None

    assert await _commit(store, claim, batch="b1", trajectories=["t1", "t2"]) == 1

    policy = await policy_of_batch(store, "b1")
    assert policy is not None
    assert (policy.policy_version, policy.parent_version, policy.window_id) == (1, 0, WINDOW.id)
    row = await get_window(store, WINDOW.id)
    assert row is not None
    assert (row.state, row.batch_id) == (WindowState.TRAINED, "b1")
    assert row.metrics["training_loss"] == 0.25
    used = await store.pool.fetchrow('SELECT "usedInTraining", "trainedInBatch" FROM trajectories')
    assert tuple(used or ()) == (True, "b1")
    batch = await store.pool.fetchrow("SELECT * FROM training_batches")
    assert batch is not None
    assert (batch["status"], batch["trainingLoss"]) == ("completed", 0.25)
    assert json.loads(batch["rewardsJson"]) == [0.5, None]
    model = await store.pool.fetchrow("SELECT * FROM trained_models")
    assert model is not None
    assert (model["modelId"], model["status"], model["avgReward"]) == ("babylon-v1", "ready", 0.5)

    await set_verdict(store, claim, 1, {"promote": False, "reason": "worse"})
    assert (await get_policy(store, 1)).verdict == {"promote": False, "reason": "worse"}
    with pytest.raises(ModelError, match="no policy version 7"):
        await get_policy(store, 7)


async def test_a_window_is_committed_once(store: Store) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    await _commit(store, claim, batch="b1", trajectories=["t1"])
    with pytest.raises(AlreadyTrainedError, match="was trained as batch b1"):
        await _commit(store, claim, batch="b2", trajectories=["t2"])


async def test_a_trajectory_is_never_trained_twice_and_refusal_is_clean(
    store: Store,
) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    first = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    await _commit(store, first, batch="b1", trajectories=["t1"])
    second = await claim_window(store, WINDOW.next(), owner="worker", lease_s=60)
    with pytest.raises(AlreadyTrainedError, match=r"batch b2 .*t1"):
        await _commit(store, second, batch="b2", trajectories=["t0", "t1"])
    trained = await store.pool.fetch("SELECT trajectory_id FROM babylon.trained")
    assert [row["trajectory_id"] for row in trained] == ["t1"]
    assert len(await list_policies(store)) == 2
    assert await store.pool.fetchval("SELECT count(*) FROM trained_models") == 1


async def test_concurrent_commits_get_different_versions(store: Store) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    claims = [
        await claim_window(store, window, owner="worker", lease_s=60)
        for window in (WINDOW, WINDOW.next())
    ]
    versions = await asyncio.gather(
        *(_commit(store, c, batch=c.window_id, trajectories=[c.window_id]) for c in claims)
    )
    assert sorted(versions) == [1, 2]


async def test_a_route_is_changed_by_compare_and_swap_and_announced(store: Store) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    claim = await claim_window(store, WINDOW, owner="worker", lease_s=60)
    await _commit(store, claim, batch="b1", trajectories=["t1"])
    heard: asyncio.Queue[str] = asyncio.Queue()

    def hear(*message: Any) -> None:
        heard.put_nowait(message[3])

    async with store.pool.acquire() as listener:
        await listener.add_listener(CHANNEL, hear)
        results = await asyncio.gather(
            *(
                commit_route(
                    store, policy_version=1, author=a, reason="won", expected_route_version=1
                )
                for a in ("ann", "bob")
            ),
            return_exceptions=True,
        )
        assert await asyncio.wait_for(heard.get(), 5) == "2"
        await listener.remove_listener(CHANNEL, hear)
    assert [r for r in results if not isinstance(r, RouteConflictError)] == [2]
    route = await current_route(store)
    assert (route.route_version, route.policy_version) == (2, 1)
    assert (await champion(store))[0].policy_version == 1
    with pytest.raises(ModelError, match="no policy version 9"):
        await commit_route(
            store, policy_version=9, author="a", reason="r", expected_route_version=2
        )
    assert await store.pool.fetchval("SELECT status FROM trained_models") == "deployed"
    await commit_route(store, policy_version=0, author="a", reason="back", expected_route_version=2)
    assert await store.pool.fetchval("SELECT status FROM trained_models") == "archived"
    assert [r.policy_version for r in await list_routes(store)] == [0, 1, 0]


async def test_waiting_for_acks_names_who_lags_and_ignores_the_dead(store: Store) -> None:
    assert await wait_for_acks(store, 5, 0, 1) == ()
    await announce_gateway(store, gateway("g1", "http://one", 1))
    await announce_gateway(store, gateway("g2", "http://two", 2))
    await announce_gateway(store, gateway("dead", "http://gone", 1))
    await store.pool.execute(
        "UPDATE babylon.gateways SET seen_at = now() - $1::interval WHERE gateway_id = 'dead'",
        timedelta(minutes=1),
    )
    assert [gateway.gateway_id for gateway in await live_gateways(store)] == ["g1", "g2"]
    with pytest.raises(ServingError, match=r"g1 at http://one \(route 1\)"):
        await wait_for_acks(store, 2, 0, 0.1)
    waiting = asyncio.create_task(wait_for_acks(store, 2, 0, 5))
    await announce_gateway(store, gateway("g1", "http://one", 2))
    assert await waiting == ("g1", "g2")
    await remove_gateway(store, "g1")
    assert [gateway.gateway_id for gateway in await live_gateways(store)] == ["g2"]


async def test_recorded_calls_are_stored_once_and_all_or_none(store: Store) -> None:
    await insert_calls(store, [CALL, replace(CALL, call_id="c2")])
    await insert_calls(store, [replace(CALL, response="HOLD"), replace(CALL, call_id="c3")])
    rows = await store.pool.fetch(
        f"SELECT {', '.join(CALL_COLUMNS)} FROM babylon.calls ORDER BY call_id"
    )
    assert [row["call_id"] for row in rows] == ["c1", "c2", "c3"]
    assert RecordedCall(**rows[0]) == CALL
    broken = replace(CALL, call_id="c5", response=None)  # type: ignore[arg-type]
    with pytest.raises(asyncpg.NotNullViolationError):
        await insert_calls(store, [replace(CALL, call_id="c4"), broken])
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.calls") == 3


async def test_routes_of_years_are_all_read(store: Store) -> None:
    """An experiment and its end are two routes each hour: ten thousand in seven months."""
    await ensure_base(store, uri="file:///m", base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', 'file:///n', 'tiny')"
    )
    await store.pool.execute(
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
        " SELECT number, 1, 'test', 'experiment' FROM generate_series(2, 10001) AS number"
    )
    assert (await all_routes(store))[-1].policy_version == 0
    assert (await previous_champion(store)).policy_version == 0
    assert await champions_of(store, [1, 2, 2, 99_999]) == {1: 0, 2: 1}


async def test_the_policies_about_a_window_are_not_all_policies(store: Store) -> None:
    await ensure_base(store, uri="file:///m", base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model,"
        " window_id) SELECT number, 0, 'lora', 'file:///n', 'tiny', 'w' || number / 3"
        " FROM generate_series(1, 8) AS number"
    )
    assert [*await policies_about(store, "w1")] == [3, 4, 5]
    assert [*await policies_about(store, "w1", [7, 0, 99])] == [0, 3, 4, 5, 7]
