"""Rollback: the way back, in one step. What served before is still loaded, and was checked then,
so one row is all that it takes."""

from babylon.deploy.change import DRAIN_S, Wanted, change_route, unless_loaded
from babylon.deploy.history import previous_champion
from babylon.settings import Settings
from babylon.store.connection import Store
from babylon.store.routes import Route, current_route
from babylon.types import Change, Claim


async def rollback(
    store: Store,
    settings: Settings,
    *,
    author: str,
    reason: str,
    claim: Claim | None = None,
    route: Route | None = None,
    drain_s: float = DRAIN_S,
) -> Change:
    """End the experiment that runs, champion alone; otherwise put the champion before in force.

    Args:
        claim, route, drain_s: see ``babylon.deploy.replace``.

    Raises:
        ModelError: no other policy served before, or its checkpoint was removed.
        BabylonError: as ``change_route`` raises it.
    """
    route = route or await current_route(store)
    if route.split is not None:
        version, new = route.policy_version, None
    else:
        version = (await previous_champion(store)).policy_version
        new = await unless_loaded(store, version)
    wanted = Wanted(
        policy_version=version, new=new, check=False, author=author, reason=reason, claim=claim
    )
    return await change_route(store, settings, route, wanted, drain_s=drain_s)
