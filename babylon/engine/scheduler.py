"""Micro-batching: one worker thread that samples for all who wait on the same policy.

The worker takes the oldest job, every other waiting job of that policy up to ``MAX_BATCH``, and
samples them in one batch. Jobs that come meanwhile form the next batch.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from babylon.engine.generate import Completion, Request, generate
from babylon.engine.policies import Policy
from babylon.wire import RequestError

log = logging.getLogger(__name__)

MAX_BATCH = 64  # requests that are sampled together
MAX_WAITING = 1024  # beyond this many, requests are turned away
_GATHER_S = 0.003  # an idle worker waits this long for requests that come together


@dataclass(eq=False, kw_only=True)
class Job:
    """One request on its way. ``every_step``: the waiter wants each token, not only the last."""

    policy: Policy
    request: Request
    every_step: bool
    completion: Completion = field(default_factory=Completion)
    error: str | None = None
    cancelled: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def tokens(self) -> AsyncIterator[tuple[list[int], list[float], bool]]:
        """(new token ids, their logprobs, is this the end), until the completion is finished.

        Raises:
            RequestError: 500, sampling failed; 503, the engine is stopping.
        """
        seen, finished = 0, False
        while not finished:
            await self.wake.wait()
            self.wake.clear()
            if self.error:
                raise RequestError(500, self.error)
            completion = self.completion
            if completion.finish_reason == "abort":
                raise RequestError(503, "the engine is stopping: try again")
            finished = completion.finish_reason != "running"
            count = len(completion.logprobs)
            if count > seen or finished:
                yield completion.token_ids[seen:count], completion.logprobs[seen:count], finished
            seen = count


class Scheduler:
    """The queue and its worker. Jobs are submitted and awaited on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Job] = []
        self._running: Sequence[Job] = ()
        self._changed = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._worker.start()

    def submit(self, policy: Policy, request: Request, *, every_step: bool) -> Job:
        """Queue a request.

        Raises:
            RequestError: 503, too many are waiting.
        """
        job = Job(policy=policy, request=request, every_step=every_step)
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise RequestError(503, f"{MAX_WAITING} requests are waiting: try again")
            self._waiting.append(job)
            self._changed.notify()
        return job

    async def close(self) -> None:
        """End every job and the worker."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.completion.finish_reason = "abort"
            for job in self._running:
                job.cancelled = True
            self._changed.notify()
        _wake(self._waiting)
        await asyncio.to_thread(self._worker.join)

    def _work(self) -> None:
        while not self._closed:
            batch = self._next_batch()
            try:
                _sample(batch, self._loop)
            except Exception as error:  # the worker outlives any batch; its jobs get the error
                log.exception("sampling %d requests failed", len(batch))
                for job in batch:
                    if job.completion.finish_reason == "running":
                        job.error = f"sampling from {job.policy.name!r} failed: {error}"
            self._loop.call_soon_threadsafe(_wake, batch)

    def _next_batch(self) -> list[Job]:
        """The jobs of the oldest waiting policy; none when all were cancelled, or when closed."""
        with self._changed:
            idle = not self._waiting
            self._changed.wait_for(lambda: self._waiting or self._closed)
        if idle:
            time.sleep(_GATHER_S)
        with self._changed:
            waiting = [job for job in self._waiting if not job.cancelled]
            chosen = [job for job in waiting if job.policy is waiting[0].policy]
            batch = [] if self._closed else chosen[:MAX_BATCH]
            taken = set(map(id, batch))
            self._waiting = [job for job in waiting if id(job) not in taken]
            self._running = batch
            return batch


def _sample(batch: list[Job], loop: asyncio.AbstractEventLoop) -> None:
    if not batch:
        return

    def on_step(running: Sequence[int], completions: Sequence[Completion]) -> list[int]:
        awaited = []
        for index in running:
            job = batch[index]
            job.completion = completions[index]
            if job.every_step or job.completion.finish_reason != "running":
                awaited.append(job)
        if awaited:
            loop.call_soon_threadsafe(_wake, awaited)
        return [index for index in running if batch[index].cancelled]

    policy = batch[0].policy
    generate(
        policy.model,
        [job.request for job in batch],
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        on_step=on_step,
    )


def _wake(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.wake.set()
