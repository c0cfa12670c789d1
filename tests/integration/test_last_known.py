"""The last known state is served from while the database is away, and for no other reason."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from babylon.core.errors import DatabaseVersionError
from babylon.core.settings import DatabaseSettings, Settings
from babylon.ops import admin_process
from babylon.serving.gateway import follower, gateway_process
from babylon.serving.gateway.app import open_gateway
from babylon.serving.gateway.last_known import LastKnown, last_known_file, store_or_last_known
from babylon.store import Store, open_store
from babylon.store.api_keys import create_key, revoke_key
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


@pytest.mark.parametrize(
    ("program", "work"),
    [(gateway_process, "open_gateway"), (admin_process, "exit_with_supervisor")],
)
async def test_a_service_that_never_ran_starts_while_the_database_of_the_game_is_away(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, program: Any, work: str
) -> None:
    class Begun(Exception):
        """The service got its store."""

    def begin(*_: object, **__: object) -> None:
        raise Begun

    monkeypatch.setattr(program, work, begin)
    arguments = [None] if program is gateway_process else []
    apart = settings.replace(database={"game_url": SecretStr("postgresql://a@127.0.0.1:1/none")})
    with pytest.raises(Begun):
        await program.run(apart, *arguments)


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


async def test_a_key_that_was_just_revoked_is_not_kept(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "POLL_S", 1e6)  # it is told, and then nothing else happens
    monkeypatch.setattr(follower, "RETRY_S", 1e6)
    await ensure_base(store, uri="Qwen/tiny", base_model="tiny")
    key = await create_key(store, "agents", scopes=["infer"])
    kept = last_known_file(settings.home.root, 8000, settings.database)
    async with open_gateway(
        store,
        settings.home,
        settings.serving,
        alias="babylon",
        engine_url="http://127.0.0.1:9",
        gateway_id="test",
        url="http://localhost:9",
        last_known=kept,
    ):
        for revoked in (False, True):
            if revoked:
                await revoke_key(store, key.key_id)
            async with asyncio.timeout(60):
                while not (known := kept.read()) or [
                    one.revoked_at is not None for one in known.keys
                ] != [revoked]:
                    await asyncio.sleep(0.05)
