"""What the list of routes says of the past: who replaced whom, and how a policy's turn ended."""

from collections.abc import Iterable, Sequence

from babylon.core.errors import ModelError
from babylon.store.connection import Store
from babylon.store.policies import Policy, get_policy
from babylon.store.routes import Route, list_routes

RESTORER = "babylon"  # author of the routes that take back what gateways did not serve


async def all_routes(store: Store) -> list[Route]:
    """Newest first."""
    return await list_routes(store, limit=10_000)


async def previous_champion(store: Store) -> Policy:
    """The policy to roll back to: the one that the present champion replaced.

    Raises:
        ModelError: there was no other.
    """
    routes = reversed(await all_routes(store))
    served = champions([route.policy_version for route in routes])
    if len(served) < 2:
        raise ModelError(
            "no other policy served before, there is nothing to roll back to: name one with"
            " `babylon deploy replace`"
        )
    return await get_policy(store, served[-2])


def champions(routed: Iterable[int]) -> list[int]:
    """From the champion of every route, oldest first, those that replaced one another.

    A route back to an earlier policy undoes those in between, so that neither a second rollback
    nor one after a failed deployment leads to what was given up. A challenger is in nobody's place.
    """
    served: dict[int, None] = {}
    for version in routed:
        while version in served:
            served.popitem()
        served[version] = None
    return list(served)


def same_champion_since(routes: Sequence[Route], route_version: int) -> bool:
    """Has no other policy been champion since that route? ``routes``: newest first."""
    since = {route.policy_version for route in routes if route.route_version >= route_version}
    return len(since) == 1


def taken_back(routes: Sequence[Route], policy_version: int) -> Route | None:
    """The route that last ended the policy's turn, as champion or challenger; ``None`` when it
    never had one, or still has it. ``routes``: newest first."""
    after: Route | None = None
    for route in routes:
        if policy_version in route.versions:
            return after
        after = route
    return None
