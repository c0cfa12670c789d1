"""What a window's run does about the experiment that is on: its analysis decides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from babylon.deploy.experiments import experiment, next_canary_share
from babylon.deploy.replace import replace
from babylon.deploy.rollback import rollback
from babylon.settings import Settings
from babylon.store.connection import Store
from babylon.store.routes import Route
from babylon.types import Change, Claim
from babylon.windows import parse_window_id

if TYPE_CHECKING:
    from babylon.experiment.review import Review


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The analysis of an experiment, and the change of the route that it led to, if any."""

    review: "Review"
    change: Change | None = None


async def decide(store: Store, settings: Settings, route: Route, claim: Claim) -> Decided | None:
    """Promote the challenger, roll it back, or let the experiment go on; a canary that later
    windows ramp takes its next step then. ``None`` when none runs.

    Raises:
        BabylonError: as ``replace`` and ``rollback`` raise it.
    """
    from babylon.experiment.review import review  # polars: only while an experiment runs

    if route.split is None or (found := await review(store, settings)) is None:
        return None
    about = {
        "author": claim.owner,
        "reason": f"{route.split.mode}: {found.reason}",
        "claim": claim,
        "route": route,
    }
    change = None
    if found.decision == "promote":
        change = await replace(store, settings, route.split.challenger_version, **about)
    elif found.decision == "rollback":
        change = await rollback(store, settings, **about)
    elif share := _next_share(settings, route, claim):
        change = await experiment(store, settings, "canary", share=share, **about)
    return Decided(review=found, change=change)


def _next_share(settings: Settings, route: Route, claim: Claim) -> float | None:
    """A step is over when a window has ended after it began: neither a backfill of old windows nor
    a run that goes on after a crash takes one too many."""
    if settings.deployment_strategy != "canary" or route.mode != "canary" or not route.share:
        return None
    ended = parse_window_id(claim.window_id, settings.minutes).end
    return next_canary_share(route.share) if ended > route.created_at else None
