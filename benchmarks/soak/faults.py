"""Faults of the soak: kills of every service, a restarted database, and a full disk.

Each service is struck by itself, again and again, so faults overlap. A process that dies within a
minute of its start is started after a pause, which doubles until one has lived for a minute.
"""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from babylon.core.errors import BabylonError
from babylon.core.processes import Processes
from babylon.core.settings import Settings
from babylon.core.windows import IN_WORK
from babylon.ops.prefect_env import prefect_api
from babylon.ops.up.health import TIMEOUT, is_healthy
from babylon.ops.up.prefect_call import call
from babylon.ops.up.services import services
from babylon.store.connection import UNREACHABLE, Store
from babylon.store.windows import list_windows, lost_windows

UP = ("supervisor", "serving", "prefect-server", "worker-cpu", "worker-gpu")  # on record
INSIDE = {
    "engine": "engine_process",
    "gateway": "gateway_process",
    "admin": "babylon.ops.admin_process",
}
# Age in seconds at which a process is struck, from ... to. A run is one of a worker's.
AGES = {
    "supervisor": (20, 30),
    "serving": (290, 350),
    "prefect-server": (75, 105),
    "worker-cpu": (30, 75),
    "worker-gpu": (30, 75),
    "engine": (30, 75),
    "gateway": (30, 75),
    "admin": (30, 75),
    "postgres": (61, 75),
    "run": (3, 25),
}
TARGETS = tuple(AGES)
RESTARTED, DISK = "postgres, stopped in order", "disk"
DISK_REST = (150, 210)
AT_A_TIME = 3  # services that are down, runs apart
LONGEST_S = 600.0
FULL_S = 5.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: what it hit, when it began, and the seconds until that answered again."""

    target: str
    at: float
    back_s: float | None  # None: not within LONGEST_S
    load: float


class Faults:
    """Strikes the services of one home."""

    def __init__(self, settings: Settings, store: Store, seed: int) -> None:
        self._settings, self._store = settings, store
        self._home, self._lease_s = settings.home.root, settings.windows.lease_s
        self._processes = Processes(home=self._home)
        self._services = {one.name: one for one in services(settings)}
        self._api = prefect_api(settings.home, settings.prefect)
        self._random = random.Random(seed)
        self._down = asyncio.Semaphore(AT_A_TIME)
        self.struck: list[Fault] = []

    async def strike_for_ever(self, volume: Path | None) -> None:
        """Strike all targets. ``volume``: the home's own small disk, which is filled up."""
        async with asyncio.TaskGroup() as group:
            for target in TARGETS:
                group.create_task(self._strike(target))
            if volume:
                group.create_task(self._fill_again(volume))

    async def _strike(self, target: str) -> None:
        order = signal.SIGKILL
        await asyncio.sleep(self._random.uniform(0, 60))
        async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
            while True:
                await self._until_old(target, self._random.uniform(*AGES[target]))
                if target == "run":
                    await self._strike_once(http, target, order)
                else:
                    async with self._down:
                        await self._strike_once(http, target, order)
                if target == "postgres":  # every second time it is stopped in order
                    order = signal.SIGINT if order == signal.SIGKILL else signal.SIGKILL

    async def _strike_once(
        self, http: aiohttp.ClientSession, target: str, order: signal.Signals
    ) -> None:
        began, load, killed_at = time.monotonic(), os.getloadavg()[0], datetime.now(UTC)
        if (pid := self.kill(target, order)) is None:  # it went down by another's death
            return
        back = await _until(lambda: self._is_back(http, target, pid, killed_at))
        self._note(target if order == signal.SIGKILL else RESTARTED, began, load, back)

    async def _until_old(self, target: str, age_s: float) -> None:
        if target == "run":
            await self._until_a_window_ended()
        while True:
            with suppress(psutil.NoSuchProcess):
                for process in self.processes(target):
                    if time.time() - process.create_time() > age_s:
                        return
            await asyncio.sleep(1)

    async def _until_a_window_ended(self) -> None:
        """Let training get on between two kills of its runs, for two minutes at most."""
        before: int | None = None

        async def ended() -> bool:
            nonlocal before
            rows = await list_windows(self._store)
            now = sum(1 for row in rows if row.state not in IN_WORK)
            before = now if before is None else before
            return now > before

        await _until(ended, 120)

    def _note(self, target: str, began: float, load: float, back: bool) -> None:
        back_s = time.monotonic() - began if back else None
        self.struck.append(Fault(target, began, back_s, load))
        took = "not in time" if back_s is None else f"{back_s:.1f} s"
        print(f"{len(self.struck)}. {target}: back {took}, load {load:.0f}", flush=True)

    def note_jump(self, name: str, at: float) -> None:
        """Note a jump of a clock, which needs no recovery."""
        self.struck.append(Fault(name, at, 0.0, os.getloadavg()[0]))

    def kill(self, target: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Send a signal to one process of the target. Return its pid, None if none runs."""
        for process in self.processes(target):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                return int(process.pid)
        return None

    def processes(self, target: str) -> list[psutil.Process]:
        """Return the processes of a service; of the workers' runs in random order."""
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess, OSError, ValueError, IndexError):
            if target in UP:
                if record := self._processes.running(target):
                    found.append(psutil.Process(record.pid))
            elif target in INSIDE:
                if record := self._processes.running("serving"):
                    children = psutil.Process(record.pid).children()
                    found += [one for one in children if _runs(one, INSIDE[target])]
            elif target == "postgres":
                pid = (self._home / "postgres" / "data" / "postmaster.pid").read_text().split()[0]
                found.append(psutil.Process(int(pid)))
            elif target == "run":
                for worker in ("worker-cpu", "worker-gpu"):
                    if record := self._processes.running(worker):
                        found += psutil.Process(record.pid).children()
                self._random.shuffle(found)
        return found

    async def _is_back(
        self, http: aiohttp.ClientSession, target: str, killed: int, killed_at: datetime
    ) -> bool:
        """Return True if another process does the work of the killed one."""
        if target == "run":  # until its lease ends, nobody knows that its window is lost
            leased = datetime.now(UTC) - killed_at < timedelta(seconds=self._lease_s)
            return not leased and not await lost_windows(self._store)
        if target == "postgres":
            return bool(await self._store.pool.fetchval("SELECT 1"))
        if killed in (found := [one.pid for one in self.processes(target)]) or not found:
            return False
        serving = self._settings.serving
        if target == "engine":
            return await _answers(http, f"http://127.0.0.1:{serving.engine_port}/health")
        if target == "gateway":
            return await _answers(http, f"{serving.endpoint.rstrip('/')}/health")
        if target == "admin":
            return await _answers(http, f"http://127.0.0.1:{serving.admin_port}/health")
        if pool := target in self._services and self._services[target].pool:
            return await self._heard_since(http, pool, killed_at)
        return target == "supervisor" or await is_healthy(http, self._services[target])

    async def _heard_since(
        self, http: aiohttp.ClientSession, pool: str, killed_at: datetime
    ) -> bool:
        """Return True if Prefect heard from a worker since the one before was killed."""
        found: list[dict[str, Any]] = await call(
            http, self._api, "POST", f"work_pools/{pool}/workers/filter", {}
        )
        heard = [one["last_heartbeat_time"] for one in found]
        return any(datetime.fromisoformat(one) > killed_at for one in heard)

    async def until_healthy(self) -> bool:
        """Return False if not every service answers in time."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
            return await _until(lambda: self._all_answer(http))

    async def _all_answer(self, http: aiohttp.ClientSession) -> bool:
        for service in self._services.values():
            if not self._processes.running(service.name) or not await is_healthy(http, service):
                return False
        return all(
            [await self._is_back(http, one, 0, datetime.min) for one in (*INSIDE, "postgres")]
        )

    async def _fill_again(self, volume: Path) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(*DISK_REST))
            began, load = time.monotonic(), os.getloadavg()[0]
            await asyncio.to_thread(_fill, volume / "filler")
            await asyncio.sleep(FULL_S)
            (volume / "filler").unlink()
            self._note(DISK, began, load, await self.until_healthy())


async def _until(is_back: Callable[[], Awaitable[bool]], longest_s: float = LONGEST_S) -> bool:
    deadline = time.monotonic() + longest_s
    await asyncio.sleep(0.3)  # the kernel has to end the process
    while time.monotonic() < deadline:
        with suppress(aiohttp.ClientError, BabylonError, TimeoutError, *UNREACHABLE):
            if await is_back():
                return True
        await asyncio.sleep(_POLL_S)
    return False


def _runs(process: psutil.Process, program: str) -> bool:
    try:
        return any(program in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too; its siblings live
        return False


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(url) as answer:
        return answer.status == 200


def _fill(filler: Path) -> None:
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**20))
            file.flush()


def small_disk(directory: Path, mib: int) -> bool:
    """Mount a small disk in memory, or take the one there. Return False if that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    if directory.is_mount():
        return True
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "soak", str(directory)]
    return subprocess.run(mount, capture_output=True).returncode == 0
