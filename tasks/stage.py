"""What every stage has in common: its name, its retries and its progress line.

A stage is retried only when the database connection broke, because nothing else gets better by
waiting. Results are not persisted and nothing is cached: Postgres decides what was done.
"""

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import asyncpg
from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run
from prefect.tasks import exponential_backoff

from babylon.core.errors import DatabaseError

P = ParamSpec("P")
R = TypeVar("R")

_BROKEN = (
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,  # in the middle of a cursor
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,  # the server is starting
)

Listener = Callable[[str, str, int, int], None]
listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
"""Hears (flow run, stage, done, total) of each stage as it starts and goes on; draws progress."""


def stage(
    name: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Task[P, Coroutine[Any, Any, R]]]:
    """``@stage("collect")``: a Prefect task of that name."""
    return task(
        name=name,
        retries=3,
        retry_delay_seconds=exponential_backoff(2),
        retry_jitter_factor=0.5,
        retry_condition_fn=_connection_broke,
        on_running=[_announce],
        persist_result=False,
        cache_policy=NO_CACHE,
    )


def is_connection_error(error: object) -> bool:
    """True when the connection to the database failed, when it was opened or in the middle."""
    if isinstance(error, DatabaseError):
        return isinstance(error.__cause__, (OSError, *_BROKEN))
    return isinstance(error, (ConnectionError, asyncpg.InterfaceError, *_BROKEN))


def _connection_broke(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    return is_connection_error(state.data)


def announce(stage: str, done: int = 0, total: int = 0) -> None:
    if (hear := listener.get()) is not None:
        hear(flow_run.name or "", stage, done, total)


def _announce(task: Task[Any, Any], _run: TaskRun, _state: State[Any]) -> None:
    announce(task.name)
