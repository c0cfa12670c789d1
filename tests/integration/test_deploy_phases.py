"""One change of the route, and everything that can go wrong in it. No policy here can be loaded, so
the checks refuse each; the gateway is what Postgres knows of one."""

import asyncio

import pytest

from babylon.core.errors import CheckpointRefusedError, ModelError, RouteConflictError, ServingError
from babylon.core.settings import Settings
from babylon.deployment import change
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.store import Store
from babylon.store.proposals import open_proposals
from babylon.store.routes import champions, current_route, list_routes
from tests.deployments import announced, outcomes, serving, three_policies

BY_HAND = ChangeRequest(author="operator", reason="by hand", drain_s=1.0)
FORCED = ChangeRequest(author="operator", reason="I know better", force=True, drain_s=1.0)


@pytest.fixture
async def policies(store: Store) -> None:
    await three_policies(store)


pytestmark = pytest.mark.usefixtures("policies")


async def test_refused_checks_change_only_the_proposal(store: Store, settings: Settings) -> None:
    async with announced(store):
        with pytest.raises(CheckpointRefusedError, match="policy 0 keeps serving") as refused:
            await replace_champion(store, checks_under(settings), 1, BY_HAND)
    assert len(await list_routes(store)) == 1
    assert await outcomes(store) == [str(refused.value)]
    assert refused.value.checks["checks"]
    assert not await open_proposals(store)


async def test_force_skips_the_checks_and_is_recorded(store: Store, settings: Settings) -> None:
    async with announced(store):
        made = await replace_champion(store, checks_under(settings), 1, FORCED)
    assert (made.policy_version, made.acknowledged_by, made.checks) == (1, ("g1",), None)
    assert made.prepare_s > 0 and made.commit_s > 0 and made.unfinished == 0
    route = await current_route(store)
    assert route.reason == made.reason == "I know better; its checks were skipped by hand"
    assert await outcomes(store) == ["committed"]


async def test_without_a_gateway_a_change_is_a_row(store: Store, settings: Settings) -> None:
    made = await replace_champion(store, checks_under(settings), 1, BY_HAND)
    assert (made.route_version, made.acknowledged_by, made.checks) == (2, (), None)
    assert await serving(store) == 1


async def test_the_slower_of_two_changes_is_refused(store: Store, settings: Settings) -> None:
    async with announced(store):
        # Both begin with an open connection, so that both see the same route.
        await asyncio.gather(*(store.pool.execute("SELECT pg_sleep(0.05)") for _ in range(4)))
        results = await asyncio.gather(
            *(
                replace_champion(store, checks_under(settings), version, FORCED)
                for version in (1, 2)
            ),
            return_exceptions=True,
        )
    (refused,) = (result for result in results if isinstance(result, BaseException))
    assert isinstance(refused, RouteConflictError) and "decide again" in str(refused)
    assert len(await list_routes(store)) == 2


@pytest.mark.parametrize("refuses", [{}, {1: "out of memory"}], ids=["silent", "refuses"])
async def test_a_route_that_a_gateway_does_not_follow_is_taken_back_with_both_its_arms(
    store: Store, settings: Settings, refuses: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_experiment(store, checks_under(settings), "ab", 1, 0.3, BY_HAND)
    before = await current_route(store)
    monkeypatch.setattr(change, "ACK_S", 0.3)
    async with announced(store, refuses=refuses, until_route=before.route_version):
        with pytest.raises(ServingError, match=r"out of memory|fewer than half of the gateways"):
            await replace_champion(store, checks_under(settings), 1, BY_HAND)
    after, taken_back, *_ = await list_routes(store)
    assert (after.versions, after.split) == (before.versions, before.split)
    assert after.author == "babylon"
    assert after.reason == f"route {taken_back.route_version} was not acknowledged"


async def test_a_serving_champion_is_only_waited_for(store: Store, settings: Settings) -> None:
    async with announced(store):
        made = await replace_champion(store, checks_under(settings), 0, BY_HAND)
    assert (made.route_version, made.acknowledged_by) == (1, ("g1",))
    assert len(await list_routes(store)) == 1


async def test_a_rollback_to_what_is_loaded_loads_and_checks_nothing(
    store: Store, settings: Settings
) -> None:
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    proposed = await outcomes(store)
    async with announced(store, holds=(0,)):
        made = await roll_back(store, BY_HAND)
    assert (made.policy_version, made.prepare_s, made.checks) == (0, 0.0, None)
    assert await outcomes(store) == proposed


async def test_a_rollback_to_what_is_not_loaded_loads_it_and_checks_nothing(
    store: Store, settings: Settings
) -> None:
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    async with announced(store):
        made = await roll_back(store, BY_HAND)
    assert made.policy_version == 0 and made.prepare_s > 0
    assert await outcomes(store) == ["committed", "committed"]


async def test_rolling_back_twice_goes_back_twice(store: Store, settings: Settings) -> None:
    for version in (1, 2):
        await replace_champion(store, checks_under(settings), version, BY_HAND)
    for expected in (1, 0):
        assert (await roll_back(store, BY_HAND)).policy_version == expected
    with pytest.raises(ModelError, match="nothing to roll back to"):
        await roll_back(store, BY_HAND)


async def test_a_rollback_never_leads_to_a_challenger(store: Store, settings: Settings) -> None:
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    await run_experiment(store, checks_under(settings), "ab", 2, 0.5, BY_HAND)
    ended = await roll_back(store, BY_HAND)
    assert (ended.policy_version, ended.challenger_version) == (1, None)
    assert (await roll_back(store, BY_HAND)).policy_version == 0


async def test_an_unknown_policy_is_named(store: Store, settings: Settings) -> None:
    with pytest.raises(ModelError, match=r"no policy version 7: see `babylon model list`"):
        await replace_champion(store, checks_under(settings), 7, BY_HAND)


def test_champions_are_those_that_replaced_one_another() -> None:
    assert champions([0, 1, 2]) == [0, 1, 2]
    assert champions([0, 1, 2, 1]) == [0, 1]
    assert champions([0, 1, 0, 3]) == [0, 3]
    assert champions([]) == []
