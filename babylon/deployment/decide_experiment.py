"""What a window's run does about the experiment that is on: its analysis decides."""

from dataclasses import dataclass

from babylon.core.settings import Settings
from babylon.core.types import Change, Claim
from babylon.core.windows import parse_window_id
from babylon.deployment.change import Order
from babylon.deployment.experiments import next_canary_share, run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.evaluation.experiment.review import review
from babylon.evaluation.experiment.review_records import Review
from babylon.store.connection import Store
from babylon.store.routes import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The analysis of an experiment, and the change of the route that it led to, if any."""

    review: Review
    change: Change | None = None


async def decide(store: Store, settings: Settings, route: Route, claim: Claim) -> Decided | None:
    """Promote the challenger; end the experiment with the champion alone, for harm or for want of a
    decision in time; or let it go on: a canary that windows ramp takes its next step then, unless
    the analysis warns.

    Returns:
        ``None`` when no experiment runs.

    Raises:
        BabylonError: as ``change_route`` raises it.
    """
    if route.split is None:
        return None
    found = await review(store, settings)
    if found is None:  # it ended just now
        return None
    order = Order(
        author=claim.owner,
        reason=f"{route.split.mode}: {found.reason}",
        claim=claim,
        route=route,
    )
    change = None
    if found.decision == "promote":
        change = await replace_champion(store, settings, route.split.challenger_version, order)
    elif found.decision in ("rollback", "keep"):
        change = await roll_back(store, settings, order)
    elif not found.warns and (share := _next_share(settings, route, claim)):
        change = await run_experiment(store, settings, "canary", None, share, order)
    return Decided(review=found, change=change)


def _next_share(settings: Settings, route: Route, claim: Claim) -> float | None:
    """A step is over when a window has ended after it began: neither a backfill of old windows nor
    a run that goes on after a crash takes one too many."""
    if settings.deployment.strategy != "canary" or route.mode != "canary" or not route.share:
        return None
    ended = parse_window_id(claim.window_id, settings.windows.minutes).end
    return next_canary_share(route.share) if ended > route.created_at else None
