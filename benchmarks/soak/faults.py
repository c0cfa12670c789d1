"""Faults of the soak: kills of every service, and a full disk."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from babylon.core.processes import Processes
from babylon.core.settings import Settings
from babylon.ops.up.health import TIMEOUT, is_healthy
from babylon.ops.up.services import services
from babylon.store.connection import UNREACHABLE, Store

UP = ("supervisor", "serving", "prefect-server", "worker-cpu", "worker-gpu")  # on record
INSIDE = {
    "engine": "engine_process",
    "gateway": "gateway_process",
    "admin": "babylon.ops.admin_process",
}
TARGETS = (*UP, *INSIDE, "postgres", "run")
LONGEST_S = 180.0
FULL_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: what it hit, when it began, and the seconds until all was healthy again."""

    target: str
    at: float
    back_s: float | None  # None: not within LONGEST_S
    load: float


class Faults:
    """Strikes the services of one home, each in turn, and waits until they are back."""

    def __init__(self, settings: Settings, store: Store, seed: int) -> None:
        self._settings, self._store = settings, store
        self._home = settings.home.root
        self._processes = Processes(home=self._home)
        self._random = random.Random(seed)
        self.struck: list[Fault] = []

    async def strike_for_ever(self, volume: Path | None) -> None:
        """Kill one after the other. ``volume``: the home's own small disk, which is filled up."""
        while True:
            targets = [*TARGETS, *(["disk"] if volume else [])]
            self._random.shuffle(targets)
            for target in targets:
                await asyncio.sleep(self._random.uniform(0.2, 3.0))
                began, load = time.monotonic(), os.getloadavg()[0]
                if target == "disk" and volume:
                    await self._fill(volume)
                elif not self.kill(target):
                    continue  # no run is in work
                back = await self.until_healthy()
                back_s = time.monotonic() - began if back else None
                self.struck.append(Fault(target, began, back_s, load))
                took = "not in time" if back_s is None else f"{back_s:.1f} s"
                print(f"{target}: back {took}, load {load:.0f}", flush=True)

    def kill(self, target: str) -> bool:
        """Send SIGKILL. Return False if no such process runs."""
        found = False
        for process in self.processes(target):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
                found = True
            if target != "run":
                break
        return found

    def processes(self, target: str) -> Iterator[psutil.Process]:
        """Yield the processes of a service, the one to kill first."""
        with suppress(psutil.NoSuchProcess, OSError, ValueError):
            if target in UP:
                if record := self._processes.running(target):
                    yield psutil.Process(record.pid)
            elif target in INSIDE:
                if record := self._processes.running("serving"):
                    for child in psutil.Process(record.pid).children():
                        if any(INSIDE[target] in word for word in child.cmdline()):
                            yield child
            elif target == "postgres":
                pid = (self._home / "postgres" / "data" / "postmaster.pid").read_text().split()[0]
                yield psutil.Process(int(pid))
            elif target == "run" and (record := self._processes.running("worker-cpu")):
                yield from psutil.Process(record.pid).children()

    async def until_healthy(self) -> bool:
        """Return False if not every service answers in time. New processes count, old ones not."""
        deadline = time.monotonic() + LONGEST_S
        await asyncio.sleep(0.3)  # the kernel has to end them
        async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
            while time.monotonic() < deadline:
                if await self._all_answer(http):
                    return True
                await asyncio.sleep(0.25)
        return False

    async def _all_answer(self, http: aiohttp.ClientSession) -> bool:
        if self._processes.running("supervisor") is None:
            return False
        for service in services(self._settings):
            if not self._processes.running(service.name) or not await is_healthy(http, service):
                return False
        engine = f"http://127.0.0.1:{self._settings.serving.engine_port}/health"
        try:
            async with http.get(engine) as answer:
                if answer.status != 200:
                    return False
            await self._store.pool.fetchval("SELECT 1")
        except (aiohttp.ClientError, *UNREACHABLE):
            return False
        return True

    async def _fill(self, volume: Path) -> None:
        filler = volume / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(2**20))
                file.flush()
        await asyncio.sleep(FULL_S)
        filler.unlink()


def small_disk(directory: Path, mib: int) -> bool:
    """Mount a small disk in memory. Return False where that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "soak", str(directory)]
    return subprocess.run(mount, capture_output=True).returncode == 0
