"""Track: the window's metrics, and the promoted weights, to W&B if a project is set."""

import asyncio

from babylon.core.home import Home
from babylon.core.settings import ModelSettings, TrackingSettings
from babylon.core.types import Metrics
from babylon.stages.tracking import track_window
from babylon.tasks.stage import stage


@stage("track")
async def track(
    home: Home,
    model: ModelSettings,
    tracking: TrackingSettings,
    metrics: Metrics,
    checkpoint_uri: str | None = None,
) -> bool:
    """Return True if W&B has the metrics. A failure of W&B is only logged."""
    return await asyncio.to_thread(track_window, home, model, tracking, metrics, checkpoint_uri)
