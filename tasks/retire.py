"""Retire: delete checkpoints and play that are no longer needed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from babylon.core.settings import Settings
from babylon.ops.prefect_env import remove_old_results
from babylon.stages.retention import retire_checkpoints
from babylon.stages.retire_play import retire_play
from babylon.stages.tracking import remove_old_runs
from babylon.store import open_store
from babylon.tasks.stage import stage

log = logging.getLogger("babylon.flows")


@stage("retire")
async def retire(settings: Settings) -> tuple[int, ...]:
    """Return the policy versions whose weights were deleted. Their rows stay.

    No step needs another one, and a step that fails stops no other: the disk would fill up. The
    first error is raised at the end, later ones are logged.
    """
    versions: tuple[int, ...] = ()
    failures: list[Exception] = []
    with _noted(failures):
        async with open_store(settings) as store:
            with _noted(failures):
                versions = await retire_checkpoints(store, settings)
            with _noted(failures):
                await retire_play(store, settings.home, settings.windows)
    with _noted(failures):
        remove_old_results(settings.home)
    with _noted(failures):
        remove_old_runs(settings.home, settings.windows.retention_days)
    for failure in failures[1:]:
        log.error("retire: %s", failure)
    if failures:
        raise failures[0]
    return versions


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    """Note an error of the block instead of raising it."""
    try:
        yield
    except Exception as error:
        failures.append(error)
