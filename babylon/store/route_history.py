"""The history of routes: which champion replaced which, and how a policy's turn ended."""

from collections.abc import Iterable, Sequence

from babylon.core.errors import ModelError
from babylon.store.connection import Store
from babylon.store.policies import Policy, get_policy
from babylon.store.routes import Route, list_routes

RESTORER = "babylon"  # author of routes that restore the policy before, after a failed change


async def all_routes(store: Store) -> list[Route]:
    """Return the routes, newest first."""
    return await list_routes(store, limit=10_000)


async def previous_champion(store: Store) -> Policy:
    """Return the policy to roll back to: the one that the present champion replaced.

    Raises:
        ModelError: no other policy was champion.
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
    """Reduce the champions of all routes, oldest first, to those that replaced one another.

    A route back to an earlier policy drops the policies in between. A second rollback, or a
    rollback after a failed deployment, then never leads to an abandoned policy. Challengers
    replace nobody.
    """
    served: dict[int, None] = {}
    for version in routed:
        while version in served:
            served.popitem()
        served[version] = None
    return list(served)


def same_champion_since(routes: Sequence[Route], route_version: int) -> bool:
    """Return True if the champion did not change since that route. ``routes``: newest first."""
    since = {route.policy_version for route in routes if route.route_version >= route_version}
    return len(since) == 1


def taken_back(routes: Sequence[Route], policy_version: int) -> Route | None:
    """Return the route that last ended the policy's turn as champion or challenger.

    ``None``: it never had a turn, or still has it. ``routes``: newest first.
    """
    after: Route | None = None
    for route in routes:
        if policy_version in route.versions:
            return after
        after = route
    return None
