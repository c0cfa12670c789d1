"""Recording without loss: an answer ends after its call is on the disk.

All waiting calls are written together with one sync (group commit), and each request waits for its
own. ``Shipper`` moves the calls to Postgres, which may be down meanwhile. On a full disk,
``lossless`` refuses calls, because training would never see them; ``available`` serves them and
records the gap.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from babylon.core.settings import RecordingPolicy
from babylon.serving.gateway.recording_rules import UNRECORDED, RecordingRules
from babylon.serving.gateway.segments import Segment, encode_record
from babylon.serving.gateway.shipping import Shipper
from babylon.serving.openai_wire import RequestError
from babylon.store.calls import RecordedCall, RecordingGap

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 * 2**20  # the most that is read again after a crash
PROBE_S, PROBE_BYTES = 1.0, 2**16
_Pending = tuple[bytes, "asyncio.Future[None]"]


class CallRecorder:
    """Writes calls to the disk while ``run`` runs. ``problem``: why the disk takes none."""

    def __init__(
        self, shipper: Shipper, directory: Path, policy: RecordingPolicy, gateway_id: str
    ) -> None:
        self.problem: str | None = None
        self.gap: RecordingGap | None = None
        self.lost = 0  # calls
        self.rules = RecordingRules()
        self._shipper, self._directory = shipper, directory
        self._policy, self._gateway_id = policy, gateway_id
        self._segment: Segment | None = None
        self._pending: list[_Pending] = []
        self._unwritten = 0
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")

    @property
    def recorded_until(self) -> datetime | None:
        """Every call answered before this time is in the database."""
        idle = not self._unwritten and self._shipper.idle
        return datetime.now(UTC) if idle else self._shipper.shipped_until

    def admit(self, key_id: str, agent_id: str | None, unit: str) -> bool:
        """Return whether a call will be recorded, before it is sampled.

        Args:
            unit: id of the call's trajectory, or of the call.

        Raises:
            RequestError: 503, the disk takes no calls, and the policy is ``lossless``.
        """
        if self.rules.leave_out(key_id, agent_id, unit):
            return False
        if self.problem and self._policy == "lossless":
            raise _refusal(self.problem)
        return self.problem is None

    async def record(self, call: RecordedCall) -> RecordedCall | None:
        """Write a call; with ``available``, count it as lost if the disk takes none.

        Returns:
            The call as the rules allow it, ``None`` if they do not.

        Raises:
            RequestError: 503, the call is not on the disk, and the policy is ``lossless``.
        """
        allowed = self.rules.applied(call)
        if allowed is None:
            return None
        try:
            if self.problem:
                raise _refusal(self.problem)
            await self._durable(encode_record(allowed))
        except RequestError as error:
            if self._policy == "lossless":
                raise
            self._note_gap(str(error), call.call_id)
        return allowed

    async def run(self) -> NoReturn:
        while True:
            if self.problem:
                await self._probe()
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._pending = self._pending, []
            if batch:
                await self._write(batch)

    async def close(self) -> None:
        """Ship the remaining calls if the database answers; others stay for the next start."""
        if self._segment:
            self._segment.sealed = True
        self._thread.shutdown()
        await self._shipper.close()

    async def _durable(self, record: bytes) -> None:
        durable: asyncio.Future[None] = self._loop.create_future()
        self._pending.append((record, durable))
        self._unwritten += 1
        self._arrived.set()
        try:
            await durable
        finally:
            self._unwritten -= 1

    async def _write(self, batch: Sequence[_Pending]) -> None:
        try:
            segment = await self._current()
            records = [record for record, _ in batch]
            await self._loop.run_in_executor(self._thread, segment.append, records)
        except OSError as error:
            self._failed(error)
        self._settle(batch)
        self._shipper.wake()

    def _settle(self, batch: Sequence[_Pending]) -> None:
        for _, durable in batch:
            if durable.done():  # the request was cancelled
                continue
            if self.problem:
                durable.set_exception(_refusal(self.problem))
            else:
                durable.set_result(None)

    async def _current(self) -> Segment:
        if self._segment and self._segment.durable >= SEGMENT_BYTES:
            self._segment.sealed, self._segment = True, None
        if self._segment is None:
            self._segment = await self._loop.run_in_executor(
                self._thread, Segment.create, self._directory
            )
            self._shipper.add(self._segment)
        return self._segment

    def _failed(self, error: OSError) -> None:
        """Note the problem. After a failed sync the file's state is unknown, so it is sealed."""
        if self._segment:
            self._segment.sealed, self._segment = True, None
        self.problem = (
            f"the disk of {self._directory} takes no calls ({error.strerror or error}):"
            " free it; RECORDING=available serves without recording"
        )
        log.error("%s", self.problem)

    async def _probe(self) -> None:
        """Try to write until the disk takes something again."""
        waiting, self._pending = self._pending, []
        self._settle(waiting)
        while self.problem:
            try:
                await self._loop.run_in_executor(self._thread, _try_to_write, self._directory)
            except OSError:
                await asyncio.sleep(PROBE_S)
            else:
                log.info("the disk takes calls again")
                self.problem = None
        self.gap = None  # the next failure begins another gap

    def _note_gap(self, reason: str, call_id: str) -> None:
        now = datetime.now(UTC)
        gap = self.gap or RecordingGap(self._gateway_id, now, now, 0, reason)
        ids = gap.call_ids if call_id.startswith(UNRECORDED) else (*gap.call_ids, call_id)
        self.lost += 1
        self.gap = replace(gap, ended_at=now, calls=gap.calls + 1, call_ids=ids)
        self._shipper.gap = self.gap
        self._shipper.wake()


def _refusal(problem: str) -> RequestError:
    return RequestError(503, problem, code="unavailable")


def _try_to_write(directory: Path) -> None:
    """Write, sync and remove a file, or raise ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
