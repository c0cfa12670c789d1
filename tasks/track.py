"""Track: the window's metrics to W&B, where a project is named."""

import asyncio

from babylon.core.settings import Settings
from babylon.core.types import Metrics
from babylon.stages.tracking import track_window
from babylon.tasks.stage import stage


@stage("track")
async def track(settings: Settings, metrics: Metrics) -> bool:
    """A window is never lost because W&B is: what went wrong is logged."""
    return await asyncio.to_thread(track_window, settings, metrics)
