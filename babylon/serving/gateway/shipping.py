"""Shipping of recorded calls from segments to Postgres, the oldest first.

A segment is what COPY reads, and is deleted when all its calls are committed. The segments of dead
gateways are taken over every few seconds. Their calls may be committed already; these are skipped.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import asyncpg

from babylon.core.errors import reason_of
from babylon.serving.gateway.segments import DAMAGED, Segment, abandoned, keep_refused
from babylon.store import Store
from babylon.store.calls import RecordingGap, copy_lines, upsert_gap
from babylon.store.connection import UNREACHABLE

log = logging.getLogger(__name__)

_REFUSALS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError)
COMMIT_TIMEOUT_S = 5.0
PORTION_BYTES = 2**18  # read at once, between requests, and stored together
GATHER_S = 0.1  # calls that arrive within it share a transaction
LOOK_S = 5.0  # interval of the search for segments of dead gateways
RETRY_S, LONGEST_RETRY_S = 0.25, 4.0


class Shipper:
    """Owns the segments from creation to removal.

    ``shipped_until``: every call answered before it is in the database, by ``time.monotonic``;
    ``None`` until the first success. ``gaps``: those not in the database yet, by their beginning.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self.shipped_until: float | None = None
        self.gaps: dict[datetime, RecordingGap] = {}
        self.shipped_calls = 0
        self._store, self._directory = store, directory
        self._segments: list[Segment] = []
        self._look_at = 0.0  # for segments of gateways that died
        self._due = asyncio.Event()

    def add(self, segment: Segment) -> None:
        self._segments.append(segment)

    def wake(self) -> None:
        self._due.set()

    @property
    def backlog_bytes(self) -> int:
        return sum(segment.durable - segment.shipped for segment in self._segments)

    @property
    def closed(self) -> list[Path]:
        return [segment.path for segment in self._segments if segment.sealed]

    @property
    def idle(self) -> bool:
        return self.shipped_until is not None and not self.backlog_bytes and not self.gaps

    async def run(self) -> NoReturn:
        pause = RETRY_S
        while True:
            try:
                await self.ship()
                pause = RETRY_S
            except UNREACHABLE as error:
                if pause == RETRY_S:
                    log.warning("calls stay on the disk: the database takes none (%r)", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_S)
                continue
            # Not `wait_for`: before Python 3.12 it drops a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()
                await asyncio.sleep(GATHER_S)

    async def ship(self) -> None:
        """Ship all calls that are durable now.

        Raises:
            One of ``UNREACHABLE``: some calls stay on the disk.
        """
        self._due.clear()
        begun = time.monotonic()
        if begun >= self._look_at:
            for number, segment in enumerate(abandoned(self._directory)):
                self._segments.insert(number, segment)
                await asyncio.sleep(0)  # to read one takes milliseconds; an outage leaves thousands
            self._look_at = begun + LOOK_S
        for segment in list(self._segments):
            await self._ship(segment)
        for began_at, gap in list(self.gaps.items()):
            await upsert_gap(self._store, gap)
            if self.gaps.get(began_at) is gap:  # else it grew meanwhile
                del self.gaps[began_at]
        self.shipped_until = begun

    async def close(self) -> bool:
        """Ship the remaining calls, in one attempt, and release the segments → are all stored?"""
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await self.ship()
        except UNREACHABLE as error:
            log.warning("%d bytes of calls stay on the disk (%r)", self.backlog_bytes, error)
        stored = self.idle
        for segment in self._segments:
            segment.close()
        self._segments = []
        return stored

    async def _ship(self, segment: Segment) -> None:
        damage = None
        while segment.shipped < segment.durable and damage is None:
            portion = segment.read(segment.shipped, PORTION_BYTES)
            damage = portion.damage
            await self._store_records(segment, portion.records)
            segment.shipped = portion.end
        if damage:
            lost = segment.durable - segment.shipped
            log.error("%s ends in %d bytes that are %s", segment.path, lost, damage)
        if damage or (segment.sealed and segment.shipped == segment.durable):
            self._segments.remove(segment)
            if damage == DAMAGED:
                log.error("the rest is kept in %s", segment.set_aside())
            else:
                segment.remove()

    async def _store_records(self, segment: Segment, records: Sequence[bytes]) -> None:
        lines = b"".join(map(segment.line, records))
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await copy_lines(self._store, segment.columns, lines)
        except _REFUSALS as error:
            if half := len(records) // 2:  # a refused call must not hold up the others
                await self._store_records(segment, records[:half])
                await self._store_records(segment, records[half:])
            else:
                call_id, why = lines.partition(b"\t")[0].decode(), reason_of(error)
                await asyncio.to_thread(keep_refused, self._directory, records[0], call_id, why)
        else:
            self.shipped_calls += len(records)
