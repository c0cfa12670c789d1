"""Services below the gateway die under load: the engine, and Postgres for as long as a minute.

``OUTAGE_S`` is how long Postgres stays away; ``make faults`` leaves it away for a minute.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.store import Store, open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.embedded import EmbeddedPostgres
from tests.faults.streams import (
    check_recorded,
    clients,
    more,
    replicas,
    save_policies,
    with_policies,
)
from tests.ports import free_port

OUTAGE_S = float(os.environ.get("OUTAGE_S", "60" if os.environ.get("FAULTS") == "all" else "3"))
CLIENTS = 8


async def test_postgres_away_for_a_minute_stops_no_answer_and_loses_no_call(tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = load_settings(
        home=home, database={"url": None}, serving={"engine_port": free_port()}
    )
    async with open_store(settings) as store:
        await with_policies(store, save_policies(tmp_path / "policies", 1))
        async with (
            replicas(settings, count=2) as serving,
            clients(settings, serving.urls, CLIENTS) as seen,
        ):
            await more(seen, CLIENTS)
            kill_postgres(home)
            gone, before = time.monotonic(), len(seen.answers)
            while time.monotonic() - gone < OUTAGE_S:
                await more(seen, CLIENTS)
            during = len(seen.answers) - before
            again = EmbeddedPostgres(home)
            await asyncio.to_thread(again.acquire)
            await more(seen, CLIENTS)
        async with open_store(settings) as back:
            await wait_until_recorded(back)
            await check_recorded(back, seen.answers)
        again.release()
    assert not seen.errors and not seen.refusals
    assert during >= CLIENTS


def kill_postgres(home: Path) -> None:
    postmaster = (home / "postgres" / "data" / "postmaster.pid").read_text().split()[0]
    os.kill(int(postmaster), signal.SIGKILL)


async def test_a_killed_engine_fails_its_calls_cleanly_and_comes_back_with_the_policy(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    settings = settings.replace(serving={"engine_port": free_port()})
    await with_policies(store, save_policies(tmp_path / "policies", 1))
    async with (
        replicas(settings, count=2) as serving,
        clients(settings, serving.urls, CLIENTS) as seen,
    ):
        await more(seen, CLIENTS)
        os.kill(serving.engine.pid, signal.SIGKILL)
        while not seen.refusals:
            await asyncio.sleep(0.01)
        await more(seen, CLIENTS)
    await wait_until_recorded(store)
    assert not seen.errors
    assert [refusal for refusal in seen.refusals if "engine" not in refusal] == []
    await check_recorded(store, seen.answers)
    parts = await store.pool.fetch("SELECT * FROM babylon.calls WHERE NOT trainable")
    assert all(row["finish_reason"] == "interrupted" for row in parts)
