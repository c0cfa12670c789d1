"""Experiments: a challenger answers a share of the agents, beside the champion.

An experiment is the routes with one salt. A change of the share keeps the salt: an agent that the
challenger answers keeps it while the share grows (``babylon.serving.gateway.route_table``).
"""

import math
import secrets
from typing import Literal

from babylon.core.errors import ConfigError, ExperimentError
from babylon.core.types import Change
from babylon.deployment.change import (
    ChangeRequest,
    RunChecks,
    TargetRoute,
    change_route,
    wait_until_served,
)
from babylon.store.connection import Store
from babylon.store.routes import Route, Split, current_route

Experiment = Literal["ab", "canary"]
AB_SHARE = 0.5
CANARY_SHARES = (0.05, 0.25, 0.5)


async def run_experiment(
    store: Store,
    run_checks: RunChecks,
    mode: Experiment,
    policy_version: int | None,
    share: float | None,
    request: ChangeRequest,
) -> Change:
    """Begin an experiment with a policy as challenger, or change the share of the one that runs.

    If the experiment already has this challenger and share, only wait until the gateways serve
    it.

    Args:
        policy_version: ``None`` for the challenger of the experiment that runs.
        share: Fraction of the agents for the challenger; by default 0.5 (``ab``) or 0.05
            (``canary``) at the start.

    Raises:
        ConfigError: The share is not between 0 and 1.
        ExperimentError: Another experiment runs; or none, and no policy is named.
        BabylonError: As ``change_route`` raises it.
    """
    route = request.route or await current_route(store)
    # A command that was killed after its commit may be repeated: it must not fail or add a route.
    if route.split and _in_force(route.split, mode, policy_version, share):
        return await wait_until_served(store, route)
    if route.split is None:
        split, new = _begin(route, mode, policy_version, share), policy_version
    else:
        split, new = _adjust(route, route.split, mode, policy_version, share), None
    target = TargetRoute(policy_version=route.policy_version, split=split, new=new)
    return await change_route(store, route, target, request, run_checks)


def next_canary_share(share: float) -> float | None:
    """The next larger share; ``None`` after the largest."""
    return next((step for step in CANARY_SHARES if step > share), None)


def _begin(route: Route, mode: Experiment, challenger: int | None, share: float | None) -> Split:
    if challenger is None:
        raise ExperimentError(f"no {mode} runs: name the policy to be its challenger")
    if challenger == route.policy_version:
        raise ExperimentError(
            f"policy {challenger} is the champion: name another one as its challenger"
        )
    if share is None:
        share = AB_SHARE if mode == "ab" else CANARY_SHARES[0]
    return Split(
        mode=mode,
        challenger_version=challenger,
        share=_fraction(share),
        salt=secrets.token_hex(8),
    )


def _in_force(
    running: Split, mode: Experiment, challenger: int | None, share: float | None
) -> bool:
    """Return true if the request is in force already, as after a killed command."""
    same = mode == running.mode and challenger in (None, running.challenger_version)
    return same and (share == running.share or (share is None and challenger is not None))


def _adjust(
    route: Route, running: Split, mode: Experiment, challenger: int | None, share: float | None
) -> Split:
    same = challenger in (None, running.challenger_version) and mode == running.mode
    if not same:
        raise ExperimentError(
            f"{running.mode} of policy {running.challenger_version} against policy"
            f" {route.policy_version} runs: end it first, by `babylon deploy rollback` or `babylon"
            f" deploy replace {running.challenger_version}`"
        )
    if share is None:
        raise ExperimentError(
            f"{running.mode} of policy {running.challenger_version} runs at {running.share:.0%}:"
            " give its new share"
        )
    return Split(
        mode=running.mode,
        challenger_version=running.challenger_version,
        share=_fraction(share),
        salt=running.salt,
    )


def _fraction(share: float) -> float:
    if not (math.isfinite(share) and 0 < share < 1):
        raise ConfigError(
            f"share {share:g}: give a fraction of the agents between 0 and 1, both"
            " excluded; `babylon deploy replace` sends all of them to one policy"
        )
    return share
