"""Retire: delete checkpoints and play that are no longer needed."""

from babylon.core.settings import Settings
from babylon.ops.prefect_env import remove_old_results
from babylon.stages.retention import retire_checkpoints
from babylon.stages.retire_play import retire_play
from babylon.stages.tracking import remove_old_runs
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("retire")
async def retire(settings: Settings) -> tuple[int, ...]:
    """Return the policy versions whose weights were deleted. Their rows stay."""
    async with open_store(settings) as store:
        versions = await retire_checkpoints(store, settings)
        await retire_play(store, settings.home, settings.windows)
    remove_old_results(settings.home)
    remove_old_runs(settings.home, settings.windows.retention_days)
    return versions
