"""Retire: delete the checkpoints that nobody needs any more."""

from babylon.core.settings import Settings
from babylon.stages.retention import retire_checkpoints
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("retire")
async def retire(settings: Settings) -> tuple[int, ...]:
    """The policies stay on record; the versions that are returned have lost their weights."""
    async with open_store(settings) as store:
        return await retire_checkpoints(store, settings)
