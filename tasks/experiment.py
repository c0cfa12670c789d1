"""Experiment: review the one that runs, before a window is trained and at each look for windows."""

import logging
from collections.abc import Mapping
from dataclasses import asdict

import msgspec

from babylon.core.errors import BabylonError, reason_of
from babylon.core.settings import ExperimentSettings, Settings, WindowSettings
from babylon.core.types import Claim
from babylon.deployment.change import checks_under
from babylon.deployment.decide_experiment import decide, end_without_window
from babylon.evaluation.experiment.review_page import WORDS, review_markdown
from babylon.evaluation.experiment.review_records import Review
from babylon.stages.turn import require_no_experiment
from babylon.store import Store, open_store
from babylon.store.routes import current_route
from babylon.tasks.page import leave_page
from babylon.tasks.stage import stage

log = logging.getLogger("babylon.flows")


@stage("experiment")
async def experiment(settings: Settings, claim: Claim) -> None:
    """Act on the analysis of the running experiment, and leave its page.

    Raises:
        ExperimentRunningError: it goes on; the window waits.
    """
    async with open_store(settings) as store:
        decided = await decide(
            store,
            settings.windows,
            settings.experiment,
            settings.deployment.strategy,
            checks_under(settings),
            await current_route(store),
            claim,
        )
        if decided:
            await leave_review(asdict(decided.review))
        await require_no_experiment(store, claim)


async def review_running(
    store: Store, windows: WindowSettings, experiment: ExperimentSettings
) -> None:
    """End the running experiment if it must not wait for a window's run, and leave its page.

    A failure is logged, because the windows are trained all the same.
    """
    try:
        if decided := await end_without_window(store, windows, experiment):
            await leave_review(asdict(decided.review))
    except Exception as error:
        log.error(
            "the running experiment was not reviewed: %s",
            reason_of(error),
            exc_info=None if isinstance(error, BabylonError) else error,
        )


@stage("experiment page")
async def leave_review(numbers: Mapping[str, object]) -> None:
    """Leave the page ``experiment``; each review adds a version.

    ``numbers`` is a ``Review`` as JSON.
    """
    review = msgspec.convert(numbers, Review)
    page = review_markdown(review)
    await leave_page("experiment", review.experiment, page, WORDS[review.decision])
