"""Decisions about the running experiment, in a window's run and without one."""

from dataclasses import dataclass

from babylon.core.settings import DeploymentStrategy, ExperimentSettings, WindowSettings
from babylon.core.types import CANARY, Change, Claim
from babylon.core.windows import parse_window_id
from babylon.deployment.change import ChangeRequest, RunChecks
from babylon.deployment.experiments import next_canary_share, run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.evaluation.experiment.review import review
from babylon.evaluation.experiment.review_records import Review
from babylon.store.connection import Store
from babylon.store.policies import get_policy
from babylon.store.routes import Route, Split, list_routes

REVIEWER = "experiment review"  # author of routes that end an experiment without a window


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The analysis of an experiment, and the change of the route that followed, if any."""

    review: Review
    change: Change | None = None


async def decide(
    store: Store,
    windows: WindowSettings,
    experiment: ExperimentSettings,
    strategy: DeploymentStrategy,
    run_checks: RunChecks,
    route: Route,
    claim: Claim,
) -> Decided | None:
    """Act on the analysis of the running experiment. Return ``None`` if none runs.

    The challenger becomes champion; or the experiment ends with the champion, because the
    challenger does harm or the time is over; or it goes on. A canary of the strategy ``canary``,
    or of a checkpoint that only live play can judge, gets its next share unless there is a warning.

    Raises:
        BabylonError: As ``change_route`` raises it.
    """
    if route.split is None:
        return None
    found = await review(store, windows, experiment)
    if found is None:  # it ended a moment ago
        return None
    request = ChangeRequest(
        author=claim.owner,
        reason=f"{route.split.mode}: {found.reason}",
        claim=claim,
        route=route,
    )
    change = None
    if found.decision == "promote":
        change = await replace_champion(store, run_checks, route.split.challenger_version, request)
    elif found.decision in ("rollback", "keep"):
        change = await roll_back(store, request)
    elif (
        not found.warns
        and (share := _next_share(windows, route, claim))
        and (strategy == "canary" or await _judged_live(store, route.split))
    ):
        change = await run_experiment(store, run_checks, "canary", None, share, request)
    return Decided(review=found, change=change)


async def end_without_window(
    store: Store, windows: WindowSettings, experiment: ExperimentSettings
) -> Decided | None:
    """End the running experiment if its challenger does harm or its time is over.

    No window is trained while training is on hold, or while all of them fail. A challenger must not
    keep its share for that long. Nothing is promoted here, and no share grows: that is left to the
    next window's run. Return ``None`` if no experiment runs.

    Raises:
        BabylonError: As ``change_route`` raises it.
    """
    routes = await list_routes(store, limit=1)  # none in a new database
    if not routes or (split := routes[0].split) is None:
        return None
    if (found := await review(store, windows, experiment)) is None:  # it ended a moment ago
        return None
    change = None
    if found.decision in ("rollback", "keep"):
        reason = f"{split.mode}: {found.reason}"
        request = ChangeRequest(author=REVIEWER, reason=reason, route=routes[0])
        change = await roll_back(store, request)
    return Decided(review=found, change=change)


async def _judged_live(store: Store, split: Split) -> bool:
    verdict = (await get_policy(store, split.challenger_version)).verdict
    return bool(verdict and verdict.get("evidence") == CANARY)


def _next_share(windows: WindowSettings, route: Route, claim: Claim) -> float | None:
    """The canary's next share, once a window has ended since its last step: never by a backfill."""
    if route.mode != "canary" or not route.share:
        return None
    ended = parse_window_id(claim.window_id, windows.minutes).end
    return next_canary_share(route.share) if ended > route.created_at else None
