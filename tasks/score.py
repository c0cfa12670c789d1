"""Score: one number a trajectory, from the scorer that ``settings.scoring.scorer`` names."""

from babylon.core.settings import Settings
from babylon.core.types import Scored, Thinned
from babylon.stages.score import score_window
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("score")
async def score(settings: Settings, thinned: Thinned) -> Scored:
    """A scorer that fails fails the stage; it never scores low instead."""
    async with open_store(settings) as store:
        return await score_window(store, settings, thinned)
