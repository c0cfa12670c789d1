"""How much at a time: calls of a key, calls of a policy version, and who waits for a place."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from babylon.serving.gateway.auth import Principal
from babylon.serving.openai_wire import RequestError

QUEUE_WAIT_S = 60.0


class CallLimits:
    """``concurrency``: calls of one version at a time; ``queue``: calls that may wait for one."""

    def __init__(self, concurrency: int, queue: int) -> None:
        self.waiting = 0
        self._concurrency, self._queue = concurrency, queue
        self._places: dict[str, asyncio.Semaphore] = {}
        self._of_key: Counter[str] = Counter()

    @contextmanager
    def of_key(self, principal: Principal) -> Iterator[None]:
        """
        Raises:
            RequestError: 429, as many calls of this key as it may make are running.
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

    def of_version(self, name: str) -> AbstractAsyncContextManager[None]:
        """Wait for a place at the policy ``name``, first come, first served.

        Raises:
            RequestError: 503, too many wait already, or it took too long.
        """
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = asyncio.Semaphore(self._concurrency)
        return self._queued(places) if places.locked() else places

    @asynccontextmanager
    async def _queued(self, places: asyncio.Semaphore) -> AsyncIterator[None]:
        await self._wait(places)
        try:
            yield
        finally:
            places.release()

    async def _wait(self, places: asyncio.Semaphore) -> None:
        if self.waiting >= self._queue:
            raise RequestError(503, f"{self.waiting} calls are waiting: try again", code="busy")
        self.waiting += 1
        try:
            async with asyncio.timeout(QUEUE_WAIT_S):
                await places.acquire()
        except TimeoutError as error:
            raise RequestError(
                503, f"no place after {QUEUE_WAIT_S:.0f} s: try again", code="busy"
            ) from error
        finally:
            self.waiting -= 1
