"""Samples of the soak: memory, open files, disk and rows, and their slopes."""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import numpy as np
import psutil

from babylon.store.connection import UNREACHABLE, Store
from benchmarks.soak.clocks import Clocks
from benchmarks.soak.faults import INSIDE, UP, Faults

PREFECT_TABLES = ("flow_run", "task_run", "log", "artifact", "events", "event_resources")
OUR_TABLES = ("calls", "windows", "policies", "attempts")
# Rows that are never removed: what each window and policy was, and what was trained.
LEDGER = (
    *("babylon.windows", "babylon.policies", "babylon.trained", "babylon.routes"),
    *("babylon.proposals", "trained_models", "training_batches"),
)
FILES = ("checkpoints", "artifacts", "arena", "recording", "logs", "prefect", "tmp", "postgres")
WAL = "postgres/data/pg_wal"  # Postgres bounds it itself: it grows up to max_wal_size first
WITHOUT = "disk all but the WAL and the ledger (MiB)"
# Until then there is more to remember each minute: Prefect keeps runs and events for an hour here,
# and the supervisor the news of the last hour.
WARM_S = 4500.0
BLOCKS = 20  # neighbouring samples are alike: means of blocks are nearly independent
# Two-sided 95 % quantiles of Student's t for 1 to 18 degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_T_MORE = (2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


@dataclass(frozen=True, slots=True)
class Slope:
    """Change in an hour, with its 95 % interval."""

    low: float
    middle: float
    high: float

    @property
    def grows(self) -> bool:
        return self.low > 1e-6  # rounding makes a constant grow by less


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures at a moment. A service that is away has none."""

    at: float
    values: dict[str, float]


class Watch:
    """Samples of one home, taken while the soak runs."""

    def __init__(
        self, faults: Faults, clocks: Clocks, store: Store, home: Path, prefect_url: str
    ) -> None:
        self._faults, self._clocks, self._store, self._home = faults, clocks, store, home
        self._prefect_url = prefect_url
        self.samples: list[Sample] = []
        self.quiet_since = math.inf  # faults ended

    async def sample_for_ever(self, every_s: float) -> None:
        while True:
            began = time.monotonic()
            values = await asyncio.to_thread(self._of_this_machine)
            with suppress(*UNREACHABLE, TimeoutError):
                values |= await self._of_postgres()
            for name in ("disk postgres (MiB)", WITHOUT):
                if "disk ledger (MiB)" in values:
                    values[name] -= values["disk ledger (MiB)"]
                else:  # the database is away, and its size would count as growth
                    del values[name]
            self.samples.append(Sample(began, values))
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return moments and values of a figure."""
        found = [(one.at, one.values[name]) for one in self.samples if name in one.values]
        return [at for at, _ in found], [value for _, value in found]

    def judged(self, name: str) -> tuple[list[float], list[float]]:
        """Return the part of a series whose slope counts: the quiet end, once all is warm.

        While faults last, processes live for a minute and fewer windows end in one.
        """
        moments, values = self.series(name)
        first = self.quiet_since + WARM_S
        kept = [(at, value) for at, value in zip(moments, values, strict=True) if at >= first]
        return [at for at, _ in kept], [value for _, value in kept]

    @property
    def names(self) -> list[str]:
        return sorted({name for one in self.samples for name in one.values})

    def _of_this_machine(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for target in (*UP, *INSIDE):
            with suppress(psutil.NoSuchProcess):
                for process in self._faults.processes(target):
                    values[f"memory {target} (MiB)"] = process.memory_info().rss / 2**20
                    values[f"open files {target}"] = process.num_fds()
        sizes = {name: _size(self._home / name) / 2**20 for name in (*FILES, WAL)}
        sizes["postgres"] -= sizes[WAL]
        values |= {f"disk {name} (MiB)": size for name, size in sizes.items()}
        values[WITHOUT] = sum(sizes.values()) - sizes[WAL]
        for name, offset in self._clocks.offsets.items():
            values[f"clock {name} (s)"] = offset
        return values

    async def _of_postgres(self) -> dict[str, float]:
        async with asyncio.timeout(5):
            count = "SELECT count(*) FROM babylon.{}"
            values = {
                f"rows babylon.{name}": float(await self._store.pool.fetchval(count.format(name)))
                for name in OUR_TABLES
            }
            size = "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest($1::text[]) name"
            ledger = await self._store.pool.fetchval(size, LEDGER)
            values["disk ledger (MiB)"] = float(ledger) / 2**20
            connection = await asyncpg.connect(self._prefect_url, timeout=5)
            try:
                for name in PREFECT_TABLES:
                    rows = await connection.fetchval(f"SELECT count(*) FROM {name}")
                    values[f"rows prefect.{name}"] = float(rows)
            finally:
                await connection.close()
            values["rows prefect, all"] = sum(
                number for name, number in values.items() if name.startswith("rows prefect.")
            )
            values["connections to Postgres"] = float(
                await self._store.pool.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                )
            )
        return values


def slope(moments: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Fit a line to a series, by means of blocks. ``None``: too few samples."""
    count = min(BLOCKS, len(moments) // 2)
    if count < 4:
        return None
    x = np.array([part.mean() for part in np.array_split(np.array(moments), count)]) / 3600
    y = np.array([part.mean() for part in np.array_split(np.array(values), count)])
    x = x - x.mean()
    spread = float(x @ x)
    middle = float(x @ y) / spread
    left = y - y.mean() - middle * x
    error = float(np.sqrt(left @ left / (count - 2) / spread))
    width = (*_T, *_T_MORE)[count - 3] * error
    return Slope(middle - width, middle, middle + width)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):  # passes over folders that vanish meanwhile
        for name in files:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total
