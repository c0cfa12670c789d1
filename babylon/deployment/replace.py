"""Replace: one policy answers every agent."""

from babylon.core.errors import ExperimentError
from babylon.core.settings import Settings
from babylon.core.types import Change
from babylon.deployment.change import (
    ChangeRequest,
    TargetRoute,
    change_route,
    checks_under,
    wait_until_served,
)
from babylon.store.connection import Store
from babylon.store.routes import Route, current_route


async def replace_champion(
    store: Store, settings: Settings, policy_version: int, request: ChangeRequest
) -> Change:
    """Put a policy in force for every agent, without a dropped request.

    The challenger of the experiment that runs may become champion, which ends the experiment. It
    passed the checks before it began to serve. For the champion itself, only wait until every
    gateway serves it.

    Raises:
        ExperimentError: An experiment runs, and this is not its challenger.
        BabylonError: As ``change_route`` raises it.
    """
    route = request.route or await current_route(store)
    new = None
    if route.split is not None:
        _refuse_all_but_the_challenger(route, policy_version)
    elif policy_version == route.policy_version:
        return await wait_until_served(store, route)
    else:
        new = policy_version
    target = TargetRoute(policy_version=policy_version, new=new)
    return await change_route(store, route, target, request, checks_under(settings))


def _refuse_all_but_the_challenger(route: Route, policy_version: int) -> None:
    if policy_version != route.challenger_version:
        raise ExperimentError(
            f"policy {route.challenger_version} is compared with policy {route.policy_version}"
            f" on {route.share:.0%} of the agents: `babylon deploy rollback` ends that, or"
            f" `babylon deploy replace {route.challenger_version}` in its favour"
        )
