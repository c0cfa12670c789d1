"""The last known state is served from while the database is away, and for no other reason."""

import pytest

from babylon.core.errors import DatabaseVersionError
from babylon.core.settings import Settings
from babylon.serving.gateway.last_known import LastKnown, store_or_last_known
from babylon.store import Store, open_store
from babylon.store.connection import Remembered
from babylon.store.gateways import desired
from babylon.store.policies import ensure_base


@pytest.mark.parametrize("version", ["0013", "9999"])
async def test_a_database_of_another_version_is_not_used(
    store: Store, settings: Settings, version: str
) -> None:
    await ensure_base(store, uri="Qwen/tiny", base_model="tiny")
    known = LastKnown(
        store=Remembered.of(store), desired=await desired(store), targets=(), keys=(), rules=()
    )
    await store.pool.execute("UPDATE babylon.alembic_version SET version_num = $1", version)
    opened = open_store(settings)
    with pytest.raises(DatabaseVersionError, match=version):
        async with store_or_last_known(opened, settings.database, settings.home, known):
            pass
