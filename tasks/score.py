"""Score: one number a trajectory, from the scorer that ``settings.scorer`` names."""

from babylon.score import score_window
from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Scored, Thinned
from tasks.stage import stage


@stage("score")
async def score(settings: Settings, thinned: Thinned) -> Scored:
    """A scorer that fails fails the stage; it never scores low instead."""
    async with open_store(settings) as store:
        return await score_window(store, settings, thinned)
