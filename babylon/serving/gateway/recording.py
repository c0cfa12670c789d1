"""Recording without loss: an answer ends after its call is on the disk.

A thread writes all waiting calls together with one sync (group commit), and each request waits for
its own. ``Shipper`` moves the calls to Postgres. On a full disk, ``lossless`` refuses calls that
training would never see; ``available`` serves them and records the gap.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue

from babylon.core.settings import RecordingPolicy
from babylon.serving.gateway.recording_rules import UNRECORDED, RecordingRules
from babylon.serving.gateway.segments import SEGMENT_BYTES, Segment, encode_record, try_to_write
from babylon.serving.gateway.shipping import Shipper
from babylon.serving.openai_wire import RequestError
from babylon.store.calls import RecordedCall, RecordingGap

log = logging.getLogger(__name__)

PROBE_S = 1.0
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
        self._waiting: SimpleQueue[_Pending | None] = SimpleQueue()  # None: the last
        self._unwritten = 0
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="recorder")
        self._prepared = self._threads.submit(Segment.create, directory)

    @property
    def behind(self) -> timedelta | None:
        """Every call answered longer ago is in the database; ``None`` if that is not known."""
        if self._shipper.shipped_until is None:
            return None
        if not self._unwritten and self._shipper.idle:
            return timedelta(0)
        return timedelta(seconds=time.monotonic() - self._shipper.shipped_until)

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

    async def run(self) -> None:
        await self._loop.run_in_executor(self._threads, self._write_all)

    async def close(self) -> bool:
        """Ship the remaining calls if the database answers; others stay for the next start.

        Returns:
            True if all calls are stored.
        """
        self._waiting.put(None)
        self._threads.shutdown()
        if self._segment:
            self._segment.sealed = True
        with suppress(OSError):
            self._prepared.result().remove()
        await asyncio.sleep(0)  # what was written is settled first
        self.problem = "the gateway is stopping: try again"
        return await self._shipper.close()

    async def _durable(self, record: bytes) -> None:
        durable: asyncio.Future[None] = self._loop.create_future()
        self._unwritten += 1
        self._waiting.put((record, durable))
        try:
            await durable
        finally:
            self._unwritten -= 1

    def _write_all(self) -> None:
        """Write what waits, group after group, in a thread of its own.

        An executor's call for each group would cost as much again as the write. After an error, the
        disk is tried with every group, and each ``PROBE_S``: it takes calls again once it takes a
        whole segment. A disk with less room would have calls sampled, and then refused.
        """
        problem: str | None = None
        last = False
        while not last:
            group: list[_Pending | None] = []
            with suppress(Empty):
                group.append(self._waiting.get(timeout=PROBE_S if problem else None))
                while True:
                    group.append(self._waiting.get_nowait())
            calls = [one for one in group if one]
            last = len(calls) < len(group)
            try:
                if problem:
                    try_to_write(self._directory)
                if problem or calls:
                    self._current().append([record for record, _ in calls])
                problem = None
            except OSError as error:
                problem = self._failed(error)
            self._loop.call_soon_threadsafe(self._settle, calls, problem)

    def _settle(self, calls: Sequence[_Pending], problem: str | None) -> None:
        if problem and not self.problem:
            log.error("%s", problem)
        elif self.problem and not problem:
            log.info("the disk takes calls again")
            self.gap = None  # the next failure begins another gap
        self.problem = problem
        for durable in (one for _, one in calls if not one.done()):  # others were cancelled
            if problem:
                durable.set_exception(_refusal(problem))
            else:
                durable.set_result(None)
        self._shipper.wake()

    def _current(self) -> Segment:
        """Return the segment to write to; prepare the next one."""
        if self._segment and self._segment.durable >= SEGMENT_BYTES:
            self._segment.sealed, self._segment = True, None
        if self._segment is None:
            try:
                self._segment = self._prepared.result()
            except OSError:  # perhaps long ago
                self._segment = Segment.create(self._directory)
            self._prepared = self._threads.submit(Segment.create, self._directory)
            self._shipper.add(self._segment)
        return self._segment

    def _failed(self, error: OSError) -> str:
        """Return the problem. After a failed sync the file's state is unknown, so it is sealed."""
        if self._segment:
            self._segment.sealed, self._segment = True, None
        return (
            f"the disk of {self._directory} takes no calls ({error.strerror or error}):"
            " free it; RECORDING=available serves without recording"
        )

    def _note_gap(self, reason: str, call_id: str) -> None:
        now = datetime.now(UTC)
        gap = self.gap or RecordingGap(self._gateway_id, now, now, 0, reason)
        ids = gap.call_ids if call_id.startswith(UNRECORDED) else (*gap.call_ids, call_id)
        self.lost += 1
        self.gap = replace(gap, ended_at=now, calls=gap.calls + 1, call_ids=ids)
        self._shipper.gaps[gap.began_at] = self.gap
        self._shipper.wake()


def _refusal(problem: str) -> RequestError:
    return RequestError(503, problem, code="unavailable")
