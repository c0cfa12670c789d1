"""Limits on concurrent calls of a policy version, with a queue."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.openai_wire import RequestError

QUEUE_WAIT_S = 60.0


class CallLimits:
    """``concurrency``: calls of one version at a time; ``queue``: waiting calls of all versions;
    ``keys``: the limits of each key."""

    def __init__(self, concurrency: int, queue: int, keys: KeyLimits) -> None:
        self.keys = keys
        self.waiting = 0
        self._concurrency, self._queue = concurrency, queue
        self._slots: dict[str, asyncio.Semaphore] = {}

    def for_version(self, name: str) -> AbstractAsyncContextManager[None]:
        """Wait for a slot of the policy ``name``, first come, first served.

        Raises:
            RequestError: 503, the queue is full, or no slot was free within ``QUEUE_WAIT_S``.
        """
        slots = self._slots.get(name)
        if slots is None:
            slots = self._slots[name] = asyncio.Semaphore(self._concurrency)
        return self._queued(slots) if slots.locked() else slots

    @asynccontextmanager
    async def _queued(self, slots: asyncio.Semaphore) -> AsyncIterator[None]:
        if self.waiting >= self._queue:
            raise RequestError(503, f"{self.waiting} calls are waiting: try again", code="busy")
        self.waiting += 1
        try:
            async with asyncio.timeout(QUEUE_WAIT_S):
                await slots.acquire()
        except TimeoutError as error:
            raise RequestError(
                503, f"no free slot after {QUEUE_WAIT_S:.0f} s: try again", code="busy"
            ) from error
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            slots.release()
