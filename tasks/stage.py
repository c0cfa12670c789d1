"""The decorator of every stage: name, retries, progress, and what the run's log says of it.

A stage is retried only when the database connection broke, because waiting does not help against
anything else. Results are neither persisted nor cached: Postgres decides what is done.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import asyncpg
from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from babylon.core.errors import DatabaseError, StageTimeoutError
from babylon.core.settings import Settings
from babylon.ops.pages.stage_lines import stage_lines
from babylon.tasks.progress import announce, shown

P = ParamSpec("P")
R = TypeVar("R")
Stage = Task[P, Coroutine[Any, Any, R]]

_BROKEN = (
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,  # in the middle of a cursor
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,  # the server is starting
)

log = logging.getLogger("babylon.flows")


def stage(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Stage[P, R]]:
    """``@stage("collect")``: a Prefect task of that name.

    ``Settings`` as the first argument hold the time limit. A stage without them limits itself.
    """
    prefect_task = task(
        name=name,
        retries=3,
        retry_delay_seconds=exponential_backoff(2),
        retry_jitter_factor=0.5,
        retry_condition_fn=_connection_broke,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
    return lambda function: prefect_task(_limited(name, function))


def _limited(
    name: str, function: Callable[P, Coroutine[Any, Any, R]]
) -> Callable[P, Coroutine[Any, Any, R]]:
    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        settings = args[0] if args else kwargs.get("settings")
        limit_s = settings.prefect.stage_timeout_s if isinstance(settings, Settings) else None
        announce(name)
        try:
            async with asyncio.timeout(limit_s) as limit, shown(name):
                result = await function(*args, **kwargs)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StageTimeoutError(
                f"stage {name} did not end within {limit_s:g} s: see what it waits for, or raise"
                " STAGE_TIMEOUT_SECONDS"
            ) from error
        for line in stage_lines(result):
            log.info("%s: %s", name, line)
        return result

    return run


async def run_after(work: str, task: Stage[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run a stage after finished work. Its failure is logged and does not undo the work.

    ``work``: the id of a window, or the name of a run over several.
    """
    try:
        await task(*args, **kwargs)
    except Exception as error:  # nothing that follows a finished window may undo it
        log.error("%s is over; %s after it failed: %s", work, task.name, error)


def is_connection_error(error: object) -> bool:
    """Return True if the connection to the database failed, while opening or in use."""
    if isinstance(error, DatabaseError):
        return isinstance(error.__cause__, (OSError, *_BROKEN))
    return isinstance(error, (ConnectionError, asyncpg.InterfaceError, *_BROKEN))


def _connection_broke(_task: Task[..., object], _run: TaskRun, state: State[object]) -> bool:
    return is_connection_error(state.data)
