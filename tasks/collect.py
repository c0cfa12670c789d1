"""Collect: every row of the window as the game wrote it, with the gateway's calls joined."""

from babylon.core.settings import Settings
from babylon.core.types import Claim, Collected
from babylon.core.windows import Window
from babylon.stages.collect import collect_window
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("collect")
async def collect(settings: Settings, claim: Claim, window: Window) -> Collected:
    """Read the window once; what arrives later is not part of it."""
    async with open_store(settings) as store:
        return await collect_window(store, settings, claim, window)
