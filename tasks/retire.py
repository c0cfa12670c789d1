"""Retire: delete checkpoints and play that are no longer needed."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from babylon.core.errors import StorageError
from babylon.core.home import Home, make_directory
from babylon.core.settings import Settings
from babylon.ops.prefect_env import remove_old_results
from babylon.stages.retention import retire_checkpoints
from babylon.stages.retire_play import retire_play
from babylon.stages.tracking import remove_old_runs
from babylon.store import open_store
from babylon.tasks.stage import stage

log = logging.getLogger("babylon.flows")
OFTEN_S = 3600.0  # with an object store, each retention asks it for many files
_STAMP = "retention"  # in the home's ``run``: the time of the last one


@stage("retire")
async def retire(settings: Settings) -> tuple[int, ...]:
    """Return the policy versions whose weights were deleted. Their rows stay.

    No step needs another one, and a step that fails stops no other: the disk would fill up. The
    first error is raised at the end, later ones are logged.
    """
    _stamp(settings.home)
    versions: tuple[int, ...] = ()
    failures: list[Exception] = []
    with _noted(failures):
        async with open_store(settings, game_may_be_away=True) as store:
            with _noted(failures):
                versions = await retire_checkpoints(store, settings)
            with _noted(failures):
                await retire_play(
                    store,
                    settings.home,
                    settings.windows,
                    repository=settings.publish.repository,
                )
    with _noted(failures):
        remove_old_results(settings.home)
    with _noted(failures):
        remove_old_runs(settings.home, settings.windows.retention_days)
    for failure in failures[1:]:
        log.error("retire: %s", failure)
    if failures:
        raise failures[0]
    return versions


def retention_is_due(home: Home) -> bool:
    """Return True unless a retention of this home began within the last hour."""
    try:
        age_s = time.time() - (home.root / "run" / _STAMP).stat().st_mtime
    except OSError:
        return True
    return not 0 <= age_s < OFTEN_S  # the clock may have been set back


def _stamp(home: Home) -> None:
    with suppress(OSError, StorageError):  # on a full disk retention is needed most
        make_directory(home.root / "run")
        (home.root / "run" / _STAMP).touch()


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    """Note an error of the block instead of raising it."""
    try:
        yield
    except Exception as error:
        failures.append(error)
