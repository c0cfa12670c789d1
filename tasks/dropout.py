"""Dropout: thin a large window before it is judged."""

import asyncio
import logging

from babylon.core.settings import Settings
from babylon.core.types import Thinned, Validated
from babylon.stages.dropout import thin_window
from babylon.tasks.stage import stage

log = logging.getLogger("babylon.tasks")


@stage("dropout")
async def dropout(settings: Settings, validated: Validated) -> Thinned:
    """Keep the same trajectories whenever it is repeated: the choice depends on the seed."""
    thinned = await asyncio.to_thread(thin_window, settings, validated)
    if thinned.dropped:
        log.info(
            "window %s: %d of %d trajectories dropped, which saves the judge about %d tokens",
            thinned.claim.window_id,
            thinned.dropped,
            validated.artifact.rows,
            thinned.saved_judge_tokens,
        )
    return thinned
