"""Rollback: the way back, in one step. What served before is still loaded, and was checked then,
so one row is all that it takes."""

from babylon.core.settings import Settings
from babylon.core.types import Change
from babylon.deployment.change import Order, Wanted, change_route, unless_loaded
from babylon.store.connection import Store
from babylon.store.routes import current_route, previous_champion


async def roll_back(store: Store, settings: Settings, order: Order) -> Change:
    """End the experiment that runs, champion alone; otherwise put the champion before in force.

    Raises:
        ModelError: no other policy served before, or its checkpoint was removed.
        BabylonError: as ``change_route`` raises it.
    """
    route = order.route or await current_route(store)
    if route.split is not None:
        wanted = Wanted(policy_version=route.policy_version)
    else:
        version = (await previous_champion(store)).policy_version
        new = await unless_loaded(store, version)
        wanted = Wanted(policy_version=version, new=new, check=False)
    return await change_route(store, settings, route, wanted, order)
