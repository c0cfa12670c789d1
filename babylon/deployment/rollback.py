"""Rollback in one step. The policy before is usually still loaded, and it passed its checks."""

from babylon.core.types import Change
from babylon.deployment.change import ChangeRequest, TargetRoute, change_route, version_to_load
from babylon.store.connection import Store
from babylon.store.route_history import previous_champion
from babylon.store.routes import current_route


async def roll_back(store: Store, request: ChangeRequest) -> Change:
    """End the experiment that runs and keep the champion; without one, restore the champion before.

    Raises:
        ModelError: No other policy served before, or its checkpoint was removed.
        BabylonError: As ``change_route`` raises it.
    """
    route = request.route or await current_route(store)
    if route.split is not None:
        target = TargetRoute(policy_version=route.policy_version)
    else:
        version = (await previous_champion(store)).policy_version
        target = TargetRoute(policy_version=version, new=await version_to_load(store, version))
    return await change_route(store, route, target, request, run_checks=None)
