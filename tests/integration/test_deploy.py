"""The policy that serves after a window. A verdict holds for one champion only."""

from dataclasses import asdict, replace

import pytest

from babylon.core.errors import (
    FencedError,
    ModelError,
    RouteConflictError,
    ServingError,
    SupersededError,
)
from babylon.core.settings import Settings
from babylon.core.types import Claim, Trained
from babylon.core.windows import parse_window_id
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.validate_checkpoint import validate_checkpoint
from babylon.store import Store
from babylon.store.policies import set_verdict
from babylon.store.routes import list_routes, previous_champion
from babylon.store.windows import claim_window
from tests.deployments import announced, commit, outcomes, serving, three_policies, verdict

LATER = "2025-11-14T11:00"
BY_HAND = ChangeRequest(author="operator", reason="by hand")


@pytest.fixture
async def claim(store: Store) -> Claim:
    return await three_policies(store)


async def test_only_promoted_policies_serve(store: Store, settings: Settings, claim: Claim) -> None:
    refused = await deploy_checkpoint(store, settings, verdict(claim, promote=False))
    assert (refused.deployed, refused.policy_version, await serving(store)) == (False, 0, 0)
    deployed = await deploy_checkpoint(store, settings, verdict(claim))
    assert deployed.deployed and await serving(store) == 2
    assert deployed.arm == "champion" and len(deployed.changes) == 1
    again = await deploy_checkpoint(store, settings, verdict(claim))  # after a crash
    assert again == replace(deployed, changes=())


async def test_a_fenced_worker_deploys_none(store: Store, settings: Settings, claim: Claim) -> None:
    await claim_window(store, parse_window_id(claim.window_id), owner="other", lease_s=60)
    with pytest.raises(FencedError):
        await deploy_checkpoint(store, settings, verdict(claim))
    assert await serving(store) == 0


async def test_a_verdict_about_an_earlier_champion_is_void(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    with pytest.raises(SupersededError, match="policy 2: its update started from policy 0"):
        await deploy_checkpoint(store, settings, verdict(claim, route_version=1))
    assert await serving(store) == 1
    await replace_champion(store, checks_under(settings), 0, BY_HAND)
    with pytest.raises(RouteConflictError, match="validated against another champion"):
        await deploy_checkpoint(store, settings, verdict(claim, route_version=1))


async def test_a_policy_that_no_gateway_can_load_gets_no_route(
    store: Store, settings: Settings, claim: Claim
) -> None:
    async with announced(store, refuses={2: "no such file"}):
        with pytest.raises(ServingError, match="g1 at http://one cannot hold policy 2: no such"):
            await deploy_checkpoint(store, settings, verdict(claim))
    assert len(await list_routes(store)) == 1
    with pytest.raises(ModelError, match="nothing to roll back to"):
        await previous_champion(store)


async def test_failed_checks_block_serving(store: Store, settings: Settings, claim: Claim) -> None:
    async with announced(store):
        refused = await deploy_checkpoint(store, settings, verdict(claim))
    assert not refused.deployed and refused.arm is None
    assert "/nowhere/v2" in refused.reason and "policy 0 keeps serving" in refused.reason
    assert refused.checks is not None and not refused.checks["passed"]
    assert len(await list_routes(store)) == 1
    assert refused.reason == (await outcomes(store))[0]


async def test_a_route_that_a_gateway_cannot_follow_is_undone(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await deploy_checkpoint(store, settings, verdict(claim))
    async with announced(store, refuses={2: "no such file"}, until_route=1):
        with pytest.raises(ServingError, match="no such file"):
            await deploy_checkpoint(store, settings, verdict(claim))
    assert await serving(store) == 0


async def test_a_policy_that_was_replaced_is_not_deployed_again(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await deploy_checkpoint(store, settings, verdict(claim))
    later = await claim_window(store, parse_window_id(LATER), owner="worker", lease_s=0.0)
    child = await commit(store, later, parent_version=2, name="child")
    await replace_champion(
        store, checks_under(settings), child, ChangeRequest(author="worker", reason="better still")
    )
    again = await validate_checkpoint(store, settings, trained)
    assert again == replace(verdict(claim), claim=trained.claim)
    assert (await deploy_checkpoint(store, settings, again)).deployed
    assert await serving(store) == child


async def validated_before(store: Store, claim: Claim) -> Trained:
    """Policy 2 with the verdict that a run left before it died; no policy here can be played."""
    await set_verdict(store, claim, 2, asdict(verdict(claim)))
    return Trained(
        claim=replace(claim, epoch=claim.epoch + 1),
        batch_id=f"window-{claim.window_id}",
        policy_version=2,
        parent_version=0,
        checkpoint_uri="/nowhere/v2",
        metrics={},
    )


@pytest.mark.parametrize("deployed", [False, True])
async def test_a_verdict_that_still_holds_is_not_bought_twice(
    store: Store, settings: Settings, claim: Claim, deployed: bool
) -> None:
    trained = await validated_before(store, claim)
    if deployed:
        await deploy_checkpoint(store, settings, verdict(claim))
    again = await validate_checkpoint(store, settings, trained)
    assert again == replace(verdict(claim), claim=trained.claim)


async def test_rolled_back_policies_stay(store: Store, settings: Settings, claim: Claim) -> None:
    trained = await validated_before(store, claim)
    await deploy_checkpoint(store, settings, verdict(claim))
    await replace_champion(
        store, checks_under(settings), 0, ChangeRequest(author="operator", reason="it lost money")
    )
    again = await validate_checkpoint(store, settings, trained)
    assert not again.promote
    assert again.reason == "was in force, and taken back by operator: it lost money"


async def test_a_policy_that_no_gateway_served_is_validated_again(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await deploy_checkpoint(store, settings, verdict(claim))
    async with announced(store, refuses={2: "no such file"}, until_route=1):
        with pytest.raises(ServingError):
            await deploy_checkpoint(store, settings, verdict(claim))
    settings = settings.replace(evaluation={"rules": "starter"})
    with pytest.raises(ModelError, match="no policy loads from /nowhere/base"):
        await validate_checkpoint(store, settings, trained)


async def test_after_a_change_of_champion_a_checkpoint_is_validated_again(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    settings = settings.replace(evaluation={"rules": "starter"})
    with pytest.raises(ModelError, match="no policy loads from /nowhere/v1"):
        await validate_checkpoint(store, settings, trained)
