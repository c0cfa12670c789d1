"""Stage ``deploy``: deploy a window's checkpoint, and decide the running experiment.

By ``DEPLOYMENT_STRATEGY``, a checkpoint that passed validation replaces the champion or becomes the
challenger of an experiment. While an experiment runs, the stage of each window first reviews it. No
other checkpoint is deployed before the experiment is decided.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from babylon.core.errors import CheckpointRefusedError, RouteConflictError, SupersededError
from babylon.core.settings import DeploymentStrategy, Settings
from babylon.core.types import CANARY, Arm, Change, Deployed, Verdict
from babylon.deployment.change import ChangeRequest, RunChecks, checks_under, wait_or_roll_back
from babylon.deployment.decide_experiment import Decided, decide
from babylon.deployment.experiments import run_experiment
from babylon.deployment.keep_promise import keep_promise
from babylon.deployment.replace import replace_champion
from babylon.store.connection import Store
from babylon.store.lineage import descends
from babylon.store.policies import get_policy
from babylon.store.routes import Route, all_routes, same_champion_since, superseded


async def deploy_checkpoint(store: Store, settings: Settings, verdict: Verdict) -> Deployed:
    """Deploy a checkpoint that passed validation, and wait until every live gateway serves it.

    The champion keeps serving if the checkpoint did not pass, or if the checks before deployment
    refuse it. After a crash the stage may run again: a committed route is only waited for, and a
    descendant that serves by now is left alone.

    Raises:
        SupersededError: the checkpoint's parent leads no longer, or an experiment runs: the window
            must be trained again.
        RouteConflictError: another champion served in between, so validate again; or the route
            changed at this moment.
        FencedError: another worker took over the window; nothing was changed.
        ServingError: a live gateway could not load the policy or did not switch to it; the
            previous route is in force.
    """
    routes = await all_routes(store)
    if verdict.promote and (before := await _sent_out_before(store, verdict, routes)):
        return before
    # A running experiment is reviewed even if this window's checkpoint did not pass: no other one
    # can be deployed before it is decided.
    run_checks, strategy = checks_under(settings), settings.deployment.strategy
    decided = await decide(
        store, settings.windows, settings.experiment, strategy, run_checks, routes[0], verdict.claim
    )
    if decided and decided.change:
        routes = await all_routes(store)
    back = await keep_promise(
        store, settings.seed, routes[0], verdict.claim, settings.model.name, verdict
    )
    if back or not verdict.promote:
        return _not_deployed(verdict, back or routes[0], decided, verdict.reason, change=back)
    await _require_lead(store, verdict, routes)
    try:
        sent_as = "canary" if verdict.evidence == CANARY else strategy
        change = await _send_out(store, sent_as, run_checks, verdict, routes[0])
    except CheckpointRefusedError as error:
        return _not_deployed(verdict, routes[0], decided, str(error), error.checks)
    return _deployed(verdict, change, change.acknowledged_by, decided, change)


async def _sent_out_before(
    store: Store, verdict: Verdict, routes: Sequence[Route]
) -> Deployed | None:
    """Return the deployment of an earlier run of the window, or of a policy trained from it."""
    route, version = routes[0], verdict.policy_version
    if version in route.versions:
        acks = await wait_or_roll_back(store, route.route_version, version, fallback=routes[1])
        return _deployed(verdict, route, acks)
    if await descends(store, route.policy_version, version):
        return _deployed(verdict, route, ())
    return None


async def _require_lead(store: Store, verdict: Verdict, routes: Sequence[Route]) -> None:
    """Refuse early. ``commit_route`` compares again, in the transaction that changes the route."""
    if reason := await superseded(store, await get_policy(store, verdict.policy_version)):
        raise SupersededError(f"policy {verdict.policy_version}: {reason}")
    if split := routes[0].split:
        raise SupersededError(
            f"policy {split.challenger_version} is compared with policy {routes[0].policy_version}"
            f" on {split.share:.0%} of the agents: no other checkpoint is deployed before that is"
            " decided"
        )
    if not same_champion_since(routes, verdict.route_version):
        raise RouteConflictError(
            f"policy {verdict.policy_version} was validated against another champion than policy"
            f" {routes[0].policy_version}, which leads again: validate it again"
        )


async def _send_out(
    store: Store,
    strategy: DeploymentStrategy,
    run_checks: RunChecks,
    verdict: Verdict,
    route: Route,
) -> Change:
    version = verdict.policy_version
    order = ChangeRequest(
        author=verdict.claim.owner, reason=verdict.reason, claim=verdict.claim, route=route
    )
    if strategy == "replace":
        return await replace_champion(store, run_checks, version, order)
    return await run_experiment(store, run_checks, strategy, version, None, order)


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
    route: Route | Change,
    decided: Decided | None,
    reason: str,
    checks: dict[str, Any] | None = None,
    change: Change | None = None,
) -> Deployed:
    return Deployed(
        claim=verdict.claim,
        policy_version=route.policy_version,
        deployed=False,
        route_version=route.route_version,
        reason=f"{reason}; {change.reason}" if change else reason,
        checks=checks,
        **_about(decided, change),
    )


def _about(decided: Decided | None, change: Change | None = None) -> dict[str, Any]:
    """Return the fields of ``Deployed`` that say what this run did."""
    changes = (decided and decided.change, change)
    return {
        "changes": tuple(change for change in changes if change),
        "review": asdict(decided.review) if decided else None,
    }
