"""The last known state is served from while the database is away, and for no other reason."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from babylon.core.errors import DatabaseVersionError
from babylon.core.settings import DatabaseSettings, Settings
from babylon.serving.gateway.last_known import LastKnown, last_known_file, store_or_last_known
from babylon.store import Store, open_store
from babylon.store.connection import Remembered
from babylon.store.gateways import desired
from babylon.store.policies import ensure_base


async def known_at(store: Store, place: str) -> LastKnown:
    await ensure_base(store, uri="Qwen/tiny", base_model="tiny")
    wanted = await desired(store)
    return LastKnown(
        place=place, store=Remembered.of(store), desired=wanted, targets=[], keys=[], rules=[]
    )


@pytest.mark.parametrize("version", ["0013", "9999"])
async def test_a_database_of_another_version_is_not_used(
    store: Store, settings: Settings, version: str
) -> None:
    known = await known_at(store, "here")
    await store.pool.execute("UPDATE babylon.alembic_version SET version_num = $1", version)
    opened = open_store(settings)
    with pytest.raises(DatabaseVersionError, match=version):
        async with store_or_last_known(opened, settings.database, settings.home, known):
            pass


async def test_a_gateway_of_another_database_does_not_read_it(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    here, there = (
        last_known_file(tmp_path, 8000, DatabaseSettings(url=SecretStr(url)))
        for url in ("postgresql://me:secret@one:5432/babylon", "postgresql://one:5432/other")
    )
    known = await known_at(store, here.place)
    here.write(known)
    assert here.read() == known and there.read() is None
    assert b"secret" not in (tmp_path / "run" / "last-known-8000").read_bytes()
