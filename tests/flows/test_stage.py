"""What all tasks share: when a stage is tried again."""

import asyncpg
import pytest
from prefect import flow

from babylon.core.errors import DatabaseError, TrainingError
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
