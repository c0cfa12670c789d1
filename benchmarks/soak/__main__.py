"""``python -m benchmarks.soak DIRECTORY``: run the soak for ``SOAK_MINUTES``, and report."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import openai

from babylon.core.api_keys import local_key
from babylon.core.errors import BabylonError
from babylon.core.processes import Processes, in_background
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import PrefectApi, prefect_api
from babylon.ops.up.prefect_call import call
from babylon.store import Store, open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.connection import UNREACHABLE
from babylon.store.holds import running_hold
from babylon.store.server import database_url
from babylon.store.windows import list_windows
from benchmarks.soak.ages import Ages
from benchmarks.soak.clocks import MOST_S, Clocks
from benchmarks.soak.faults import Faults, small_disk
from benchmarks.soak.fleet import SEED, Played, play_windows
from benchmarks.soak.promises import ENDED, check_promises
from benchmarks.soak.report import write_report
from benchmarks.soak.watch import Watch
from tests.ports import free_port

MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
DISK_MIB = int(os.environ.get("SOAK_DISK_MIB", "1536"))
DEPLOYMENT = "backfill/backfill"
AHEAD = 3  # windows that agents play before the oldest is trained
QUIET = float(os.environ.get("SOAK_QUIET", "0.125"))  # of the time, at the end, without faults
AGAIN_S = 20.0  # a run that did not claim a window by then is started again
PACE_S = 30.0  # of windows in the quiet end: figures that follow the pace of play keep still
SETTLE_S = 600.0  # a dead run keeps its claim, its slot and its place in the pool for minutes
SAMPLE_S = 5.0
PORTS = ("ENGINE_PORT", "ADMIN_PORT", "PREFECT_SERVER_API_PORT")
ENVIRONMENT = {
    "WINDOW_GRACE_SECONDS": "0",
    "OUTCOMES_WAIT_SECONDS": "0",
    "LOOKBACK_HOURS": "876000",
    "LEASE_SECONDS": "10",
    "SCORER": "heuristic",
    "TUNING": "full",
    "LEARNING_RATE": "1e-5",  # the gate is a coin: the policy must stay able to play
    "MIN_ACTIONS_PER_TRAJECTORY": "1",
    "ITERATIONS": "1",
    "MAX_STALENESS": "2",  # the most that it allows, so agents play AHEAD windows at most
    "BATCH_SIZE": "8",
    "GRADIENT_ACCUMULATION_STEPS": "1",
    "ARENA_SCENARIOS": "32",
    "EVALUATOR": "benchmarks.soak.coin:Coin",
    "OMP_NUM_THREADS": "1",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "3601",  # the least that it allows
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "PT1H1S",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ORPHAN_CLEANUP_LOOP_SECONDS": "60",
}


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    volume = directory / "disk"
    small = small_disk(volume, DISK_MIB)
    ports = {name: str(free_port()) for name in PORTS}
    os.environ.update(
        ENVIRONMENT | {name: os.environ[name] for name in ENVIRONMENT.keys() & os.environ.keys()},
        BABYLON_HOME=str(volume / "home"),
        LOCAL_ENDPOINT=f"http://127.0.0.1:{free_port()}",
        **ports,
    )
    os.environ.pop("DATABASE_URL", None)
    clocks = Clocks(directory / "clocks", SEED)
    notes = []
    if not small:
        notes.append("No disk was filled: a small one may not be mounted here.")
    if not clocks.install():
        notes.append("No clock was skewed: there is no C compiler.")
    try:
        asyncio.run(_soak(load_settings(), directory, volume if small else None, clocks, notes))
    finally:
        _babylon("down")
        if small:
            subprocess.run(["umount", str(volume)], check=False)


def _babylon(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "babylon", *arguments]).returncode


async def _soak(
    settings: Settings, directory: Path, volume: Path | None, clocks: Clocks, notes: list[str]
) -> None:
    await asyncio.to_thread(_babylon, "up")  # on a busy machine not all is healthy then
    if Processes(home=settings.home.root).running("supervisor") is None:
        raise SystemExit("`babylon up` failed: its last lines say why")
    settings = load_settings()  # anew: the first start made the password of Prefect's server
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first = now - timedelta(days=60)
    played = Played()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(settings))
        url = await stack.enter_async_context(database_url(settings.database, settings.home))
        client = await stack.enter_async_context(_client(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        faults = Faults(settings, store, SEED)
        watch = Watch(faults, clocks, store, settings.home.root, f"{url}_prefect")
        runs = _Runs(store, http, prefect_api(settings.home, settings.prefect), played)
        if not await faults.until_healthy():
            raise SystemExit("the system does not start")
        started = time.monotonic()
        ages = Ages(store, settings, f"{url}_prefect", played)
        begun = (settings.model.name, first, played, runs.may_play)
        async with (
            in_background(_said(watch.sample_for_ever(SAMPLE_S))),
            in_background(_said(runs.keep())),
            in_background(_said(ages.pass_for_ever())),
        ):
            async with in_background(_said(play_windows(store, client, *begun))):
                async with AsyncExitStack() as storm:
                    await storm.enter_async_context(
                        in_background(_said(faults.strike_for_ever(volume)))
                    )
                    if clocks.installed:
                        skewed = clocks.skew_for_ever(faults.note_jump)
                        await storm.enter_async_context(in_background(_said(skewed)))
                    await asyncio.sleep(MINUTES * 60 * (1 - QUIET))
                watch.quiet_since = time.monotonic()
                runs.pace_s = PACE_S
                if not await faults.until_healthy():
                    notes.append("Not every service was healthy after the faults.")
                await asyncio.sleep(MINUTES * 60 * QUIET)
            soaked = (time.monotonic() - started) / 60
            await _settled(store, played)  # windows that end now may change the route
            version = await _last_call(settings, client)
        await wait_until_recorded(store, timeout_s=60)
        promises = await check_promises(store, played, version)
    notes.append(f"Clocks jumped {clocks.jumps} times, by {MOST_S:.0f} s at most, both ways.")
    notes.append(f"Retention removed, by the simulated clock: {ages.removed}.")
    report = write_report(directory, soaked, promises, faults.struck, played, watch, notes)
    print(report.read_text(), flush=True)
    if not all(one.kept for one in promises):
        raise SystemExit("a promise was broken")


@asynccontextmanager
async def _client(settings: Settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{settings.serving.endpoint}/v1",
        api_key=str(local_key(settings.home.root)),
        max_retries=0,
        timeout=30,
    ) as client:
        yield client


async def _said(work: Any) -> None:
    """Run a part of the soak. Its failure is printed, because nobody awaits it."""
    try:
        await work
    except Exception as error:
        print(f"the soak itself failed: {error!r}", flush=True)
        raise


async def _last_call(settings: Settings, client: openai.AsyncOpenAI) -> int | None:
    """Return the version of the policy that answers a call after all faults, if one does."""
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=settings.model.name,
            messages=[{"role": "user", "content": "hold?"}],
            max_tokens=4,
        )
    except openai.OpenAIError as error:
        print(f"nobody answers at the end: {error}", flush=True)
        return None
    return int(raw.headers["x-model-version"])


async def _settled(store: Store, played: Played) -> None:
    """Wait until every played window has an end, for a while."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        done = {row.window_id for row in await list_windows(store) if row.state in ENDED}
        if set(played.windows) <= done:
            return
        await asyncio.sleep(1)


class _Runs:
    """Starts a run for the played windows, as a schedule would, while none of them is in work."""

    def __init__(
        self, store: Store, http: aiohttp.ClientSession, api: PrefectApi, played: Played
    ) -> None:
        self._store, self._http, self._api, self._played = store, http, api, played
        self._asked = -AGAIN_S
        self.pace_s, self._next = 0.0, 0.0  # seconds a window at least, time of the next one

    async def may_play(self) -> bool:
        if (now := time.monotonic()) < self._next:
            return False
        try:
            rows = await list_windows(self._store)
        except UNREACHABLE:
            return False
        done = {row.window_id for row in rows if row.state in ENDED}
        may = len(set(self._played.windows) - done) < AHEAD
        self._next = now + self.pace_s if may else 0.0
        return may

    async def keep(self) -> None:
        while True:
            try:
                await self._look()
            except (BabylonError, *UNREACHABLE) as error:  # Prefect or Postgres was killed
                print(f"no run is started now: {str(error)[:120]}", flush=True)
            await asyncio.sleep(2)

    async def _look(self) -> None:
        rows = {row.window_id: row for row in await list_windows(self._store)}
        ended = {name for name, row in rows.items() if row.state in ENDED}
        waiting = [name for name in self._played.windows if name not in ended]
        in_work = any(row.leased for row in rows.values())
        if not waiting or in_work or time.monotonic() - self._asked < AGAIN_S:
            return
        if holding := await running_hold(self._store):
            print(f"nothing is trained: {holding}", flush=True)
        named = await call(self._http, self._api, "GET", f"deployments/name/{DEPLOYMENT}")
        run = {"parameters": {"first": waiting[0], "last": waiting[-1], "placement": "inline"}}
        path = f"deployments/{named['id']}/create_flow_run"
        await call(self._http, self._api, "POST", path, run)
        self._asked = time.monotonic()


if __name__ == "__main__":
    main()
