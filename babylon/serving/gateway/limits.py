"""Limits on concurrent calls: per key and per policy version, with a queue per version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from babylon.serving.gateway.auth import Principal
from babylon.serving.openai_wire import RequestError

QUEUE_WAIT_S = 60.0


class CallLimits:
    """``concurrency``: calls of one version at a time; ``queue``: waiting calls of all versions."""

    def __init__(self, concurrency: int, queue: int) -> None:
        self.waiting = 0
        self._concurrency, self._queue = concurrency, queue
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._of_key: Counter[str] = Counter()

    @contextmanager
    def for_key(self, principal: Principal) -> Iterator[None]:
        """Count a call of a key while the block runs.

        Raises:
            RequestError: 429, the key has reached its limit.
        """
        key_id, most = principal.key_id, principal.max_concurrency
        if most is not None and self._of_key[key_id] >= most:
            raise RequestError(
                429, f"key {key_id} has {most} calls running, its limit", code="rate_limit_exceeded"
            )
        self._of_key[key_id] += 1
        try:
            yield
        finally:
            self._of_key[key_id] -= 1

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
