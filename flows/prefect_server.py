"""``python -m babylon.flows.prefect_server``: ``prefect server start`` whose SQLite writers take
turns.

Prefect begins its transactions DEFERRED. One that has read and wants to write after another has
written fails at once with "database is locked" (SQLITE_BUSY_SNAPSHOT, for which no busy timeout
applies), and a heartbeat or a state transition is lost. Begun IMMEDIATE, it takes the write lock
first and waits for it. Readers outside a transaction are not held up. A PostgreSQL address in
PREFECT_SERVER_DATABASE_CONNECTION_URL is used as it is.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.cli import app
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


class TakesTurns(AioSqliteConfiguration):
    """SQLite with IMMEDIATE transactions only."""

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


def main() -> None:
    """Configure this process's database and become Prefect's own command."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url.startswith("sqlite"):
        set_database_config(TakesTurns(connection_url=url))
    app()


if __name__ == "__main__":
    main()
