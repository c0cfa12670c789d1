"""Change the champion: by hand, by the flow, or back to the one before."""

import logging
from collections.abc import Iterable

from babylon.errors import ModelError, ServingError
from babylon.store import Store
from babylon.store.gateways import wait_for_acks
from babylon.store.policies import Policy, champion, get_policy
from babylon.store.routes import commit_route, list_routes
from babylon.types import Claim

log = logging.getLogger(__name__)
ACK_TIMEOUT_S = 630.0  # a gateway gives its engine 600 s to load a policy
RESTORER = "babylon"  # author of the routes that take back what gateways did not serve


async def promote(
    store: Store,
    policy_version: int,
    *,
    author: str,
    reason: str,
    expected_route_version: int | None = None,
    claim: Claim | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Route every agent to a policy; returns the route version and the gateways that serve it.

    A gateway loads a policy before it takes a route. If one cannot, the policy before is put in
    force again, also when the worker of a window asks a second time because it died while it
    waited. A policy that is in force already is only waited for.

    Args:
        expected_route_version: the route under which the decision was made, if not just now.
        claim: of the window whose worker asks.

    Raises:
        ModelError: there is no such policy, or its checkpoint was removed.
        RouteConflictError: somebody else changed the route meanwhile.
        FencedError: the claim is stale; nothing was changed.
        ServingError: a gateway did not follow; it names which.
    """
    policy = await get_policy(store, policy_version)
    before, route_version = await champion(store)
    if policy.policy_version == before.policy_version:
        version = route_version
        fallback = None if claim is None else await previous_champion(store)
    else:
        fallback = before
        version = await commit_route(
            store,
            policy_version=policy_version,
            author=author,
            reason=reason,
            expected_route_version=expected_route_version or route_version,
            claim=claim,
        )
    try:
        return version, await wait_for_acks(store, version, policy_version, ACK_TIMEOUT_S)
    except ServingError as error:
        if fallback is not None:
            await _restore(store, fallback, version, str(error))
        raise


async def previous_champion(store: Store) -> Policy:
    """The policy to roll back to: the one that the present one replaced.

    Raises:
        ModelError: there was no other.
    """
    routes = reversed(await list_routes(store, limit=10_000))
    served = champions([route.policy_version for route in routes])
    if len(served) < 2:
        raise ModelError("no other policy served before: nothing to roll back to")
    return await get_policy(store, served[-2])


def champions(routed: Iterable[int]) -> list[int]:
    """From the policy of every route, oldest first, the champions that replaced one another.

    A route back to an earlier policy undoes those in between, so that neither a second rollback
    nor one after a failed deployment leads to what was given up.
    """
    served: list[int] = []
    for version in routed:
        if version in served:
            del served[served.index(version) :]
        served.append(version)
    return served


async def _restore(store: Store, policy: Policy, route_version: int, reason: str) -> None:
    log.error("route %d is taken back: %s", route_version, reason)
    await commit_route(
        store,
        policy_version=policy.policy_version,
        author=RESTORER,
        reason=f"route {route_version} was not acknowledged",
        expected_route_version=route_version,
    )
