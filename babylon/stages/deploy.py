"""The deploy stage: what becomes of a window's checkpoint, and of the experiment that runs.

``DEPLOYMENT_STRATEGY``: a checkpoint that passed validation replaces the champion, or becomes the
challenger of an experiment. While one runs, each window's stage first lets its analysis decide,
and no other checkpoint goes out before it has.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from babylon.core.errors import CheckpointRefusedError, RouteConflictError
from babylon.core.settings import Settings
from babylon.core.types import Arm, Change, Deployed, Verdict
from babylon.deployment.change import Order, follow
from babylon.deployment.decide_experiment import Decided, decide
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.store.connection import Store
from babylon.store.lineage import descends
from babylon.store.routes import Route, all_routes, same_champion_since


async def deploy_checkpoint(store: Store, settings: Settings, verdict: Verdict) -> Deployed:
    """Send a checkpoint that passed validation out, and wait until every live gateway serves it.

    One that did not pass, is refused by the checks before deployment, or comes while an experiment
    goes on, changes nothing: the champion keeps serving. Running it again after a crash finds the
    route committed and only waits, or finds that a descendant serves by now, and leaves that.

    Raises:
        RouteConflictError: another champion serves since the verdict, which is void: validate
            again; or the route changed this moment.
        FencedError: another worker took the window over; nothing was changed.
        ServingError: a live gateway cannot load the policy, or did not follow; the route before
            is in force.
    """
    routes = await all_routes(store)
    if verdict.promote and (before := await _sent_out_before(store, verdict, routes)):
        return before
    decided = await decide(store, settings, routes[0], verdict.claim)
    if decided and decided.change:
        routes = await all_routes(store)
    if reason := _kept_back(verdict, decided, routes[0]):
        return _not_deployed(verdict, routes[0], decided, reason)
    if not same_champion_since(routes, verdict.route_version):
        raise RouteConflictError(
            f"policy {routes[0].policy_version} serves by now, which policy"
            f" {verdict.policy_version} was not validated against: validate it again"
        )
    try:
        change = await _send_out(store, settings, verdict, routes[0])
    except CheckpointRefusedError as error:
        return _not_deployed(verdict, routes[0], decided, str(error), error.checks)
    return _deployed(verdict, change, change.acknowledged_by, decided, change)


async def _sent_out_before(
    store: Store, verdict: Verdict, routes: Sequence[Route]
) -> Deployed | None:
    """What an earlier run of the window deployed, before it died; or a policy trained from it."""
    route, version = routes[0], verdict.policy_version
    if version in route.versions:
        acks = await follow(store, route.route_version, version, fallback=routes[1])
        return _deployed(verdict, route, acks)
    if await descends(store, route.policy_version, version):
        return _deployed(verdict, route, ())
    return None


def _kept_back(verdict: Verdict, decided: Decided | None, route: Route) -> str | None:
    """Why the checkpoint does not go out, before anybody looks at it."""
    if not verdict.promote:
        return verdict.reason
    if split := route.split:
        return (
            f"policy {split.challenger_version} is compared with policy {route.policy_version} on"
            f" {split.share:.0%} of the agents: no other checkpoint goes out before that is decided"
        )
    if decided and decided.review.decision == "promote":
        return (
            f"policy {route.policy_version} won its experiment and serves since; policy"
            f" {verdict.policy_version} was validated against the champion before"
        )
    return None


async def _send_out(store: Store, settings: Settings, verdict: Verdict, route: Route) -> Change:
    strategy, version = settings.deployment.strategy, verdict.policy_version
    order = Order(
        author=verdict.claim.owner, reason=verdict.reason, claim=verdict.claim, route=route
    )
    if strategy == "replace":
        return await replace_champion(store, settings, version, order)
    return await run_experiment(store, settings, strategy, version, None, order)


def _deployed(
    verdict: Verdict,
    serving: Route | Change,
    acknowledged_by: tuple[str, ...],
    decided: Decided | None = None,
    change: Change | None = None,
) -> Deployed:
    is_challenger = serving.challenger_version == verdict.policy_version
    arm: Arm = "challenger" if is_challenger else "champion"
    share = f"challenger at {serving.share:.0%}: " if is_challenger else ""
    return Deployed(
        claim=verdict.claim,
        policy_version=verdict.policy_version,
        deployed=True,
        route_version=serving.route_version,
        reason=share + verdict.reason,
        arm=arm,
        acknowledged_by=acknowledged_by,
        checks=change.checks if change else None,
        **_about(decided, change),
    )


def _not_deployed(
    verdict: Verdict,
    route: Route,
    decided: Decided | None,
    reason: str,
    checks: dict[str, Any] | None = None,
) -> Deployed:
    return Deployed(
        claim=verdict.claim,
        policy_version=route.policy_version,
        deployed=False,
        route_version=route.route_version,
        reason=reason,
        checks=checks,
        **_about(decided),
    )


def _about(decided: Decided | None, change: Change | None = None) -> dict[str, Any]:
    """What this run did: the fields of ``Deployed`` for it."""
    changes = (decided and decided.change, change)
    return {
        "changes": tuple(change for change in changes if change),
        "review": asdict(decided.review) if decided else None,
    }
