"""Publish: the finished window as files of the local dataset, one for each table."""

from babylon.core.settings import Settings
from babylon.core.types import Published, Scored
from babylon.dataset.build import build_tables, selection_of
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("publish")
async def publish(settings: Settings, scored: Scored) -> list[Published]:
    """Write the window's files. Publishing a window again gives the same files."""
    async with open_store(settings) as store:
        selection = await selection_of(store, settings.publish)
        return [*(await build_tables(store, settings.home, scored, selection)).values()]
