"""Checks of untrained rows that remember their results, so that no row is decoded twice.

The results are in a file of the home, by trajectory and by the row's version. The version changes
with every update of the row; the file is void when a setting of the checks or their code changes.
It keeps the results of the newest windows, ``_MOST`` of them.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import msgspec

from babylon import quality as checks
from babylon.core.game_rows import COLUMNS, GameRow
from babylon.core.home import Home
from babylon.core.settings import QualitySettings
from babylon.core.types import Rejection
from babylon.core.windows import FIRST_YEAR, LAST_YEAR, Window
from babylon.quality.row_checks import check_row
from babylon.store import Store
from babylon.store.game_tables import batches_of_plays

log = logging.getLogger(__name__)
_MOST = 200_000  # results, about 20 MB
NARROW = f"""t."trajectoryId" AS trajectory_id, t."agentId" AS agent_id, t."windowId" AS window_id,
    CASE WHEN t."startTime" BETWEEN '{FIRST_YEAR}-01-01' AND '{LAST_YEAR}-12-31'
         THEN t."startTime" AT TIME ZONE 'UTC' END AS start,
    hashtextextended(concat_ws('|', t."updatedAt", t."agentId", t."windowId", t."windowHours",
        t."scenarioId", t."startTime", t."endTime", t."totalReward", t."finalPnL",
        pg_column_size(t."stepsJson"), pg_column_size(t."metricsJson"),
        pg_column_size(t."metadataJson"),
        pg_column_size(t."rewardComponentsJson")), 0) AS version"""
"""The select list of a ``NarrowRow``. It reads no large value, only the sizes of them."""

_WIDE = f'SELECT {COLUMNS} FROM trajectories t WHERE t."trajectoryId" = ANY($1)'


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowRow:
    """A row of the game without its large columns; ``version`` changes with any of them."""

    trajectory_id: str
    agent_id: str
    window_id: str | None
    start: datetime | None
    version: int


class CheckedRow(msgspec.Struct, array_like=True, frozen=True):
    """The result for one version of a row in one window; without a ``reason`` it was accepted."""

    version: int
    window: str
    reason: str = ""
    detail: str = ""

    def rejection(self, trajectory_id: str) -> Rejection | None:
        if not self.reason:
            return None
        return Rejection(trajectory_id=trajectory_id, reason=self.reason, detail=self.detail)


class CheckedRows:
    """The results of a home. Without a home nothing is remembered."""

    def __init__(self, quality: QualitySettings, home: Home | None = None) -> None:
        self._quality = quality
        self._path: Path | None = None
        if home is not None:
            self._path = home.root / "cache" / f"checked-{_fingerprint(quality)}.msgpack"
        self._known: dict[str, CheckedRow] = {}

    async def check(
        self, store: Store, rows: Iterable[tuple[NarrowRow, Window]]
    ) -> AsyncIterator[tuple[NarrowRow, Rejection | None]]:
        """Yield each row with the reason against it, or None if it can be trained."""
        await asyncio.to_thread(self._load)
        unknown: dict[str, tuple[NarrowRow, Window]] = {}
        for row, window in rows:
            known = self._known.get(row.trajectory_id)
            if known and (known.version, known.window) == (row.version, _name(window)):
                yield row, known.rejection(row.trajectory_id)
            else:
                unknown[row.trajectory_id] = row, window
        for batch in await batches_of_plays(store.game, [*unknown]):
            for name, wide in (await self._read(store, batch)).items():
                row, window = unknown[name]
                yield row, self._decode(row, wide, window)
        if unknown:
            await asyncio.to_thread(self._save)

    async def _read(self, store: Store, ids: Sequence[str]) -> dict[str, GameRow]:
        return {row["trajectory_id"]: GameRow(**row) for row in await store.game.fetch(_WIDE, ids)}

    def _decode(self, row: NarrowRow, wide: GameRow, window: Window) -> Rejection | None:
        verdict = check_row(wide, window, self._quality)
        found = CheckedRow(row.version, _name(window))
        if isinstance(verdict, Rejection):
            found = CheckedRow(row.version, _name(window), str(verdict.reason), verdict.detail)
        self._known[row.trajectory_id] = found
        return found.rejection(row.trajectory_id)

    def _load(self) -> None:
        if self._path is None or self._known:
            return
        try:
            self._known = msgspec.msgpack.decode(
                self._path.read_bytes(), type=dict[str, CheckedRow]
            )
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is not readable (%s): all rows are checked again", self._path, error)

    def _save(self) -> None:
        if self._path is None:
            return
        newest_last = sorted(self._known.items(), key=lambda known: known[1].window)
        self._known = dict(newest_last[-_MOST:])
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for older in self._path.parent.glob("checked-*.msgpack"):
                if older != self._path:
                    older.unlink(missing_ok=True)
            temporary.write_bytes(msgspec.msgpack.encode(self._known))
            temporary.replace(self._path)
        except OSError as error:  # the report is right without it
            log.warning("%s is not written (%s): rows are decoded again", self._path, error)


def _name(window: Window) -> str:
    return f"{window.key}/{window.minutes}"


def _fingerprint(quality: QualitySettings) -> str:
    digest = hashlib.sha256(msgspec.json.encode(quality.model_dump(mode="json")))
    digest.update(_code())
    return digest.hexdigest()[:16]


@cache
def _code() -> bytes:
    """Return a digest of the modules that check rows."""
    digest = hashlib.sha256()
    for path in sorted(Path(directory) for directory in checks.__path__):
        for file in sorted(path.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.digest()
