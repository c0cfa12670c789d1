"""The deploy stage: one route row decides who serves; gateways follow it and say so."""

from babylon.settings import Settings
from babylon.store.connection import Store
from babylon.store.policies import champion
from babylon.store.routes import commit_route, wait_for_acks
from babylon.types import Deployed, Verdict

ACK_TIMEOUT_S = 60.0


async def deploy_checkpoint(store: Store, settings: Settings, verdict: Verdict) -> Deployed:
    """Put a checkpoint that passed into force and wait until every live gateway serves it.

    A checkpoint that did not pass changes nothing: the champion keeps serving. Running it again
    after a crash finds the route already committed and only waits.

    Raises:
        RouteConflictError: somebody else changed the route meanwhile.
        ServingError: a live gateway does not follow; the route stays committed.
    """
    serving, route_version = await champion(store)
    if not verdict.promote:
        return Deployed(
            claim=verdict.claim,
            policy_version=serving.policy_version,
            deployed=False,
            route_version=route_version,
        )
    if serving.policy_version != verdict.policy_version:
        route_version = await commit_route(
            store,
            policy_version=verdict.policy_version,
            author=verdict.claim.owner,
            reason=verdict.reason,
            expected_route_version=route_version,
        )
    gateways = await wait_for_acks(store, route_version, ACK_TIMEOUT_S)
    return Deployed(
        claim=verdict.claim,
        policy_version=verdict.policy_version,
        deployed=True,
        route_version=route_version,
        acknowledged_by=gateways,
    )
