"""Rollback: the way back, in one step. What served before is still loaded, and was checked then,
so one row is all that it takes."""

from babylon.core.settings import Settings
from babylon.core.types import Change
from babylon.deployment.change import ChangeRequest, TargetRoute, change_route, version_to_load
from babylon.store.connection import Store
from babylon.store.route_history import previous_champion
from babylon.store.routes import current_route


async def roll_back(store: Store, settings: Settings, request: ChangeRequest) -> Change:
    """End the experiment that runs, champion alone; otherwise put the champion before in force.

    Raises:
        ModelError: no other policy served before, or its checkpoint was removed.
        BabylonError: as ``change_route`` raises it.
    """
    route = request.route or await current_route(store)
    if route.split is not None:
        target = TargetRoute(policy_version=route.policy_version)
    else:
        version = (await previous_champion(store)).policy_version
        new = await version_to_load(store, version)
        target = TargetRoute(policy_version=version, new=new, check=False)
    return await change_route(store, settings, route, target, request)
