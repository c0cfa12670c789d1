"""Publish: the window's trajectories and scores as one Parquet file of the local dataset."""

import asyncio

from babylon.core.settings import Settings
from babylon.core.types import Published, Scored
from babylon.stages.publish import publish_window
from babylon.tasks.stage import stage


@stage("publish")
async def publish(settings: Settings, scored: Scored) -> Published:
    """Write the window's file. Publishing a window again gives the same file."""
    return await asyncio.to_thread(publish_window, settings.home, scored)
