"""Who serves: deployments are tied to the route the verdict is about, and can be taken back."""

from dataclasses import asdict, replace

import pytest

from babylon.arena.gate import validate_checkpoint
from babylon.deploy import deploy_checkpoint
from babylon.errors import FencedError, ModelError, RouteConflictError, ServingError
from babylon.promotion import previous_champion, promote
from babylon.settings import Settings
from babylon.store import Store
from babylon.store.gateways import Gateway, announce_gateway
from babylon.store.policies import champion, commit_policy, ensure_base, set_verdict
from babylon.store.windows import claim_window
from babylon.types import Claim, Trained, Verdict
from babylon.windows import parse_window_id

LATER = "2025-11-14T11:00"
REFUSES_2 = Gateway(
    gateway_id="g1", url="http://one", route_version=1, refusals={"2": "no such file"}
)


async def commit(store: Store, claim: Claim, *, parent_version: int, name: str) -> int:
    return await commit_policy(
        store,
        claim,
        parent_version=parent_version,
        kind="lora",
        uri=f"/nowhere/{name}",
        base_model="tiny",
        batch_id=f"window-{claim.window_id}",
        trajectory_ids=[name],
        metrics={},
    )


@pytest.fixture
async def claim(store: Store) -> Claim:
    """Policies 0 (serving), 1 and 2, and the claim that trained the last."""
    await ensure_base(store, uri="/nowhere/base", base_model="tiny")
    for version, hour in ((1, "09"), (2, "10")):
        window = parse_window_id(f"2025-11-14T{hour}:00")
        claim = await claim_window(store, window, owner="worker", lease_s=0.0)
        await commit(store, claim, parent_version=0, name=f"v{version}")
    return claim


def verdict(claim: Claim, *, promote: bool = True, route_version: int = 1) -> Verdict:
    measured = (
        *("pnl_before", "pnl_after", "pnl_difference_low", "pnl_difference_high"),
        *("win_rate_before", "win_rate_after", "malformed_before", "malformed_after"),
    )
    return Verdict(
        claim=claim,
        policy_version=2,
        route_version=route_version,
        promote=promote,
        reason="test",
        scenarios=32,
        **dict.fromkeys(measured, 0.0),
    )


async def serving(store: Store) -> int:
    return (await champion(store))[0].policy_version


async def test_a_promoted_checkpoint_serves_and_a_refused_one_changes_nothing(
    store: Store, claim: Claim
) -> None:
    refused = await deploy_checkpoint(store, verdict(claim, promote=False))
    assert (refused.deployed, refused.policy_version, await serving(store)) == (False, 0, 0)
    deployed = await deploy_checkpoint(store, verdict(claim))
    assert deployed.deployed and await serving(store) == 2
    assert await deploy_checkpoint(store, verdict(claim)) == deployed  # again, after a crash


async def test_a_worker_whose_window_was_taken_over_cannot_deploy(
    store: Store, claim: Claim
) -> None:
    await claim_window(store, parse_window_id(claim.window_id), owner="other", lease_s=60)
    with pytest.raises(FencedError):
        await deploy_checkpoint(store, verdict(claim))
    assert await serving(store) == 0


async def test_a_verdict_about_an_earlier_champion_is_void(store: Store, claim: Claim) -> None:
    await promote(store, 1, author="operator", reason="by hand")
    with pytest.raises(RouteConflictError):
        await deploy_checkpoint(store, verdict(claim, route_version=1))
    assert await serving(store) == 1


async def test_a_policy_that_a_gateway_cannot_serve_is_taken_back(
    store: Store, claim: Claim
) -> None:
    await announce_gateway(store, REFUSES_2)
    with pytest.raises(ServingError, match="g1 at http://one cannot serve route 2: no such file"):
        await deploy_checkpoint(store, verdict(claim))
    assert await serving(store) == 0
    with pytest.raises(ModelError, match="nothing to roll back to"):
        await previous_champion(store)


async def test_a_deployment_whose_worker_died_while_it_waited_is_taken_back_too(
    store: Store, claim: Claim
) -> None:
    await deploy_checkpoint(store, verdict(claim))
    await announce_gateway(store, REFUSES_2)
    with pytest.raises(ServingError, match="no such file"):
        await deploy_checkpoint(store, verdict(claim))
    assert await serving(store) == 0


async def test_what_a_descendant_replaced_was_deployed_and_stays_replaced(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await deploy_checkpoint(store, verdict(claim))
    later = await claim_window(store, parse_window_id(LATER), owner="worker", lease_s=0.0)
    child = await commit(store, later, parent_version=2, name="child")
    await promote(store, child, author="worker", reason="better still")
    again = await validate_checkpoint(store, settings, trained)
    assert again == replace(verdict(claim), claim=trained.claim)
    assert (await deploy_checkpoint(store, again)).deployed
    assert await serving(store) == child


async def test_rolling_back_twice_goes_back_twice(store: Store, claim: Claim) -> None:
    for version in (1, 2):
        await promote(store, version, author="operator", reason="forward")
    for expected in (1, 0):
        policy = await previous_champion(store)
        assert policy.policy_version == expected
        await promote(store, expected, author="operator", reason="rollback")


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
        await deploy_checkpoint(store, verdict(claim))
    again = await validate_checkpoint(store, settings, trained)
    assert again == replace(verdict(claim), claim=trained.claim)


async def test_what_was_rolled_back_is_not_deployed_again(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await deploy_checkpoint(store, verdict(claim))
    await promote(store, 0, author="operator", reason="it lost money")
    again = await validate_checkpoint(store, settings, trained)
    assert not again.promote
    assert again.reason == "was in force, and taken back by operator: it lost money"


async def test_what_no_gateway_served_is_validated_again(
    store: Store, settings: Settings, claim: Claim
) -> None:
    trained = await validated_before(store, claim)
    await announce_gateway(store, REFUSES_2)
    with pytest.raises(ServingError):
        await deploy_checkpoint(store, verdict(claim))
    with pytest.raises(ModelError, match="no policy loads from /nowhere/base"):
        await validate_checkpoint(store, settings, trained)


async def test_a_new_champion_has_to_be_met(store: Store, settings: Settings, claim: Claim) -> None:
    trained = await validated_before(store, claim)
    await promote(store, 1, author="operator", reason="by hand")
    with pytest.raises(ModelError, match="no policy loads from /nowhere/v1"):
        await validate_checkpoint(store, settings, trained)
