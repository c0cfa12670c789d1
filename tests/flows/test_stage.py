"""Retries of a stage, which all tasks share."""

import asyncio

import asyncpg
import pytest
from prefect import flow

from babylon.core.errors import DatabaseError, StageTimeoutError, TrainingError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.tasks.stage import is_connection_error, stage


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError(), True),
        (asyncpg.ConnectionDoesNotExistError(), True),
        (asyncpg.InterfaceError("connection is closed"), True),
        (asyncpg.InternalClientError("cannot switch to state 15"), True),
        (caused(DatabaseError("gave up"), asyncpg.AdminShutdownError()), True),
        (caused(DatabaseError("starting"), asyncpg.CannotConnectNowError()), True),
        (caused(DatabaseError("down"), OSError("refused")), True),
        (caused(DatabaseError("no"), asyncpg.InvalidPasswordError()), False),
        (DatabaseError("not migrated"), False),
        (FileNotFoundError(), False),
        (TrainingError("loss is nan"), False),
    ],
)
def test_only_a_broken_connection_is_worth_another_try(error: Exception, again: bool) -> None:
    assert is_connection_error(error) is again


async def test_a_stage_is_retried_after_a_broken_connection_and_not_after_an_error() -> None:
    calls: list[str] = []

    @stage("flaky")
    async def flaky(error: Exception) -> int:
        calls.append("flaky")
        if len(calls) == 1:
            raise error
        return len(calls)

    @flow
    async def chain(error: Exception) -> int:
        return await flaky.with_options(retry_delay_seconds=0)(error)

    assert await chain(ConnectionResetError()) == 2
    calls.clear()
    with pytest.raises(TrainingError):
        await chain(TrainingError("loss is nan"))
    assert calls == ["flaky"]


async def test_a_stage_that_waits_for_ever_is_ended_by_its_limit() -> None:
    @stage("stuck")
    async def stuck(settings: Settings) -> None:
        await asyncio.sleep(60)

    @flow
    async def chain() -> None:
        await stuck(load_settings(prefect={"stage_timeout_s": 0.1}))

    with pytest.raises(StageTimeoutError, match=r"stage stuck did not end within 0\.1 s"):
        await chain()


async def test_a_timeout_inside_a_stage_stays_what_it_is() -> None:
    @stage("inside")
    async def inside(settings: Settings) -> None:
        raise TimeoutError("of a request")

    @flow
    async def chain() -> None:
        await inside(load_settings())

    with pytest.raises(TimeoutError, match="of a request"):
        await chain()
