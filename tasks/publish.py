"""Publish: the window's trajectories and scores as one Parquet file of the local dataset."""

import asyncio

from babylon.dataset.export import publish_window
from babylon.settings import Settings
from babylon.types import Published, Scored
from tasks.stage import stage


@stage("publish")
async def publish(settings: Settings, scored: Scored) -> Published:
    """Publishing a window again writes the same file."""
    return await asyncio.to_thread(publish_window, settings, scored)
