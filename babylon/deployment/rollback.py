"""Rollback in one step. The policy before is usually still loaded, and it passed its checks."""

from babylon.core.types import Change
from babylon.deployment.change import ChangeRequest, TargetRoute, change_route, version_to_load
from babylon.store.connection import Store
from babylon.store.routes import current_route, previous_champion


async def roll_back(store: Store, request: ChangeRequest, version: int | None = None) -> Change:
    """End the experiment that runs and keep the champion; without one, restore an earlier policy.

    That is ``version``, by default the champion before.

    Raises:
        ModelError: No other policy served before, or its checkpoint was removed.
        BabylonError: As ``change_route`` raises it.
    """
    route = request.route or await current_route(store)
    if route.split is not None:
        target = TargetRoute(policy_version=route.policy_version)
    else:
        if version is None:
            version = (await previous_champion(store)).policy_version
        target = TargetRoute(policy_version=version, new=await version_to_load(store, version))
    return await change_route(store, route, target, request, run_checks=None)
