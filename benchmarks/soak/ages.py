"""Simulated days pass for what is finished, so that retention has something to remove.

A soak plays days of windows within an hour. Postgres, Prefect and the files stamp everything with
the real time, by which nothing would ever be old. So stamps of finished work are moved to the time
of its window, and Babylon's own retention runs with that clock. Nothing is removed here.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg

from babylon.core.errors import BabylonError
from babylon.core.settings import Settings
from babylon.core.windows import Window, parse_window_id
from babylon.stages.retire_play import retire_play
from babylon.store.connection import UNREACHABLE, Store
from babylon.store.windows import WindowRow, list_windows
from benchmarks.soak.fleet import Played
from benchmarks.soak.promises import ENDED

RETENTION_DAYS = 1
PASS_S = 15.0
_HOUR_S = 3600.0
_RESTING_S = 120.0  # a file, or the run that wrote it, is at rest by then
# An hour passes for a run that ended, and for its events, which automations read for ten minutes.
_RUNS = (
    "UPDATE flow_run SET end_time = end_time - interval '1 hour' WHERE parent_task_run_id IS NULL"
    " AND end_time BETWEEN now() - interval '1 hour' AND now() - interval '3 minutes'"
)
# A window that failed is tried again after simulated minutes, which are real seconds.
_RETRIES = (
    "UPDATE babylon.windows SET retry_at = updated_at + (retry_at - updated_at) / 60"
    " WHERE retry_at > updated_at + interval '14 minutes'"
)
# Calls of gates and checks, which belong to no window of play.
_OTHER_CALLS = (
    "UPDATE babylon.calls SET started_at = $1, recorded_at = $1 WHERE recorded_at > $1"
    " AND recorded_at < now() - interval '2 minutes' AND NOT call_id = ANY($2)"
)
_EVENTS = (
    "UPDATE {} SET occurred = occurred - interval '1 hour'"
    " WHERE occurred BETWEEN now() - interval '1 hour' AND now() - interval '11 minutes'"
)


class Ages:
    """Lets simulated days pass for one home."""

    def __init__(self, store: Store, settings: Settings, prefect_url: str, played: Played) -> None:
        self._store, self._settings, self._played = store, settings, played
        self._prefect_url = prefect_url
        self._aged: set[str] = set()
        self.removed: dict[str, int] = {}

    async def pass_for_ever(self) -> None:
        while True:
            await asyncio.sleep(PASS_S)
            with suppress(BabylonError, asyncpg.PostgresError, TimeoutError, *UNREACHABLE):
                await self._pass()

    async def _pass(self) -> None:
        await self._played.look_for_calls(self._store)
        ended = {row.window_id: row for row in await list_windows(self._store)}
        ended = {name: row for name, row in ended.items() if row.state in ENDED}
        for name in ended.keys() - self._aged:
            await self._age(parse_window_id(name), ended[name])
        await self._store.pool.execute(_RETRIES)
        await asyncio.to_thread(_age_files, self._settings.home.artifacts)
        if ended:
            windows = self._settings.windows.model_copy(
                update={"retention_days": RETENTION_DAYS, "lookback_hours": 24}
            )
            now = max(parse_window_id(name).end for name in ended)
            await self._store.pool.execute(_OTHER_CALLS, now, list(self._played.answered))
            retired = await retire_play(self._store, self._settings.home, windows, now=now)
            for what in ("windows", "calls", "files"):
                self.removed[what] = self.removed.get(what, 0) + getattr(retired, what)
        async with asyncio.timeout(10):
            connection = await asyncpg.connect(self._prefect_url, timeout=5)
            try:
                for statement in (_RUNS, *map(_EVENTS.format, ("events", "event_resources"))):
                    await connection.execute(statement)
            finally:
                await connection.close()

    async def _age(self, window: Window, row: WindowRow) -> None:
        """Date a finished window, its calls and its plays by the window."""
        calls = self._played.calls.get(row.window_id)
        if calls is None:  # its play goes on
            return
        if not set(calls) <= self._played.stored.keys():  # some are on their way to Postgres
            return
        moment: datetime = window.end + timedelta(minutes=5)
        pool = self._store.pool
        await pool.execute(
            "UPDATE babylon.calls SET started_at = $2, recorded_at = $2"
            " WHERE call_id = ANY($1) AND recorded_at > $2",
            calls,
            window.start,
        )
        await pool.execute(
            "UPDATE babylon.plays SET began_at = $2 WHERE began_at > $2 AND trajectory_id IN"
            " (SELECT trajectory_id FROM babylon.calls WHERE call_id = ANY($1))",
            calls,
            window.start,
        )
        await pool.execute(
            "UPDATE babylon.windows SET updated_at = $2 WHERE window_id = $1 AND state = $3",
            row.window_id,
            moment,
            row.state,
        )
        self._aged.add(row.window_id)


def _age_files(directory: Path) -> None:
    """Let an hour pass for the files that are at rest."""
    now = time.time()
    for path in _files(directory):
        with suppress(OSError):
            if now - _HOUR_S < (changed := path.stat().st_mtime) < now - _RESTING_S:
                os.utime(path, (changed - _HOUR_S, changed - _HOUR_S))


def _files(directory: Path) -> Iterable[Path]:
    return [path for path in directory.glob("*") if path.is_file()]
