"""Score: one number a trajectory, from the scorer that ``settings.scoring.scorer`` names."""

from babylon.core.settings import Settings
from babylon.core.types import Scored, Thinned
from babylon.stages.claim import commit_scored
from babylon.stages.score import score_window
from babylon.store import open_store
from babylon.tasks.limits import limited, limits_of_scoring
from babylon.tasks.stage import stage


@stage("score")
async def score(settings: Settings, thinned: Thinned) -> Scored:
    """Score the window and commit the scores. A failing scorer fails the stage."""
    async with open_store(settings) as store:
        async with limited(*limits_of_scoring(settings.scoring.scorer, settings.judge)):
            scored = await score_window(store, settings, thinned)
        await commit_scored(store, scored)
    return scored
