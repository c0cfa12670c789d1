"""The deploy stage: one route row decides who serves; gateways follow it and say so."""

from babylon.promotion import promote
from babylon.store.connection import Store
from babylon.store.policies import champion, descends
from babylon.types import Deployed, Verdict


async def deploy_checkpoint(store: Store, verdict: Verdict) -> Deployed:
    """Put a checkpoint that passed into force and wait until every live gateway serves it.

    A checkpoint that did not pass changes nothing: the champion keeps serving. Running it again
    after a crash finds the route committed and only waits, or finds that a descendant serves by
    now, and leaves that in force.

    Raises:
        RouteConflictError: the route changed since the verdict, which is void: validate again.
        FencedError: another worker took the window over; nothing was changed.
        ServingError: a live gateway does not follow; the route before is in force again.
    """
    serving, route_version = await champion(store)
    if not verdict.promote:
        return Deployed(
            claim=verdict.claim,
            policy_version=serving.policy_version,
            deployed=False,
            route_version=route_version,
        )
    if await descends(store, serving.policy_version, verdict.policy_version):
        return Deployed(
            claim=verdict.claim,
            policy_version=verdict.policy_version,
            deployed=True,
            route_version=route_version,
        )
    route_version, gateways = await promote(
        store,
        verdict.policy_version,
        author=verdict.claim.owner,
        reason=verdict.reason,
        expected_route_version=verdict.route_version,
        claim=verdict.claim,
    )
    return Deployed(
        claim=verdict.claim,
        policy_version=verdict.policy_version,
        deployed=True,
        route_version=route_version,
        acknowledged_by=gateways,
    )
