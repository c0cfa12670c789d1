"""Collect: every row of the window as the game wrote it, with the calls of the gateway."""

import logging

from babylon.core.settings import Settings
from babylon.core.types import Claim, Collected
from babylon.core.windows import Window
from babylon.stages.claim import commit_collected
from babylon.stages.collect import collect_window
from babylon.store import open_store
from babylon.tasks.stage import stage

log = logging.getLogger("babylon.flows")


@stage("collect")
async def collect(settings: Settings, claim: Claim, window: Window) -> Collected:
    """Read the window and commit what was read. Rows that arrive later are late."""
    async with open_store(settings) as store:
        collected = await collect_window(store, settings.home, claim, window)
        await commit_collected(store, collected)
    if collected.outcomes == 0:
        log.warning(
            "window %s has no market outcomes and is judged without: once they are written,"
            " `babylon judge again --window %s` judges it with them",
            window.key,
            window.id,
        )
    return collected
