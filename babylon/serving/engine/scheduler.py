"""Scheduling of requests: a queue, one worker thread, and a running batch for each policy.

Policies with work take turns. In its turn, waiting requests join the policy's batch, and the batch
makes one step. So no answer waits for a longer one, nor for another policy's.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.running_batch import Batch, Row
from babylon.serving.engine.sampling import Completion, Request
from babylon.serving.openai_wire import RequestError

log = logging.getLogger(__name__)

MAX_BATCH = 64  # requests of a policy that are sampled together
MAX_WAITING = 1024  # waiting requests; more are refused
_BATCH_TOKENS = 2**19  # rows of a batch times the longest: its keys and values are one buffer
_READ_TOKENS = 2048  # prompt tokens with padding per turn, during which all other rows wait
_TELL_S = 0.04  # interval of new tokens to streams: each time costs as much as a small model's step


@dataclass(eq=False, kw_only=True)
class Job:
    """One request. ``every_step``: the caller wants tokens as they are drawn."""

    policy: LoadedPolicy
    row: Row
    every_step: bool
    error: str | None = None
    cancelled: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def completion(self) -> Completion:
        return self.row.completion

    @property
    def size(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.row.prompt) + self.row.request.sampling.max_tokens

    async def tokens(self) -> AsyncIterator[tuple[list[int], list[float], bool]]:
        """Yield (new token ids, their logprobs, True at the end) until the completion is finished.

        Raises:
            RequestError: 400, the answer's grammar is too complex; 500, sampling failed; 503, the
                engine is stopping.
        """
        seen, finished = 0, False
        while not finished:
            await self.wake.wait()
            self.wake.clear()
            if self.error:
                raise RequestError(500, self.error)
            completion = self.completion
            if completion.problem:
                raise RequestError(
                    400, f"the grammar of this answer failed ({completion.problem}): simplify it"
                )
            if completion.finish_reason == "abort":
                raise RequestError(503, "the engine is stopping: try again")
            finished = not self.row.running
            count = len(completion.logprobs)
            if count > seen or finished:
                yield completion.token_ids[seen:count], completion.logprobs[seen:count], finished
            seen = count


class _Lane:
    """The running batch of one policy. Only the worker thread uses it."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._batch = Batch(
            policy.model, eos_token_ids=policy.eos_token_ids, pad_token_id=policy.pad_token_id
        )
        self._told_at = 0.0
        self.jobs: list[Job] = []

    def turn(self, arrived: Sequence[Job]) -> list[Job]:
        """Add the arrived jobs, make a step, and return the jobs to wake."""
        for job in self.jobs:
            if job.cancelled:
                job.completion.finish_reason = "abort"
        self.jobs += arrived
        if arrived:
            self._batch.join([job.row for job in arrived])
        self._batch.step()
        ended = [job for job in self.jobs if not job.row.running]
        self.jobs = [job for job in self.jobs if job.row.running]
        now = time.monotonic()
        if now - self._told_at < _TELL_S:
            return [*ended, *(job for job in arrived if job.every_step and job.row.running)]
        self._told_at = now
        return [*ended, *(job for job in self.jobs if job.every_step)]


class Scheduler:
    """The queue and its worker thread. Jobs are submitted and awaited on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._lanes: WeakKeyDictionary[LoadedPolicy, _Lane] = WeakKeyDictionary()
        self._changed = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._worker.start()

    def submit(
        self, policy: LoadedPolicy, requests: Sequence[Request], *, every_step: bool
    ) -> list[Job]:
        """Queue requests, all or none.

        Raises:
            RequestError: 503, the queue is full.
        """
        jobs = [Job(policy=policy, row=Row(one), every_step=every_step) for one in requests]
        with self._changed:
            if len(self._waiting) + len(jobs) > MAX_WAITING:
                raise RequestError(503, f"{MAX_WAITING} requests are waiting: try again")
            self._waiting += jobs
            self._changed.notify()
        return jobs

    async def close(self) -> None:
        """Abort all jobs and stop the worker thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._worker.join)
        for job in (*self._waiting, *self._running):
            job.completion.finish_reason = "abort"
            job.wake.set()

    def _work(self) -> None:
        while not self._closed:
            self._round()
            if not self._running:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)

    def _round(self) -> None:
        """Give each policy with work a turn: those with running rows first, then by arrival."""
        with self._changed:
            self._waiting = [job for job in self._waiting if not job.cancelled]
            working = dict.fromkeys(job.policy for job in (*self._running, *self._waiting))
        for policy in working:
            self._turn(policy)
        self._running = [job for lane in self._lanes.values() for job in lane.jobs]

    def _turn(self, policy: LoadedPolicy) -> None:
        lane = self._lanes.get(policy)
        arrived: list[Job] = []
        try:
            arrived = self._take(policy, lane.jobs if lane else ())
            lane = lane or self._lanes.setdefault(policy, _Lane(policy))
            told = lane.turn(arrived)
        except Exception as error:  # any error fails this batch's jobs, and not the worker
            if isinstance(error, torch.AcceleratorError):
                log.exception("the device fails all calls now: the engine ends, to start again")
                os._exit(1)  # an orderly end would wait for the device
            told = list({*arrived, *(lane.jobs if lane else ())})
            log.exception("sampling %d requests failed", len(told))
            for job in told:
                job.error = f"sampling from {policy.name!r} failed: {error}"
            self._lanes.pop(policy, None)
        if told:
            self._loop.call_soon_threadsafe(_wake, told)

    def _take(self, policy: LoadedPolicy, running: Sequence[Job]) -> list[Job]:
        """Take the policy's longest waiting jobs that fit, and are read in one turn."""
        with self._changed:
            waiting = [job for job in self._waiting if job.policy is policy]
            longest, taken = 0, set[Job]()
            room = max((job.size for job in running), default=0)
            for job in waiting[: MAX_BATCH - len(running)]:
                longest, room = max(longest, len(job.row.prompt)), max(room, job.size)
                rows = len(running) + len(taken) + 1
                if taken and (len(taken) + 1) * longest > _READ_TOKENS:
                    break
                if rows > 1 and rows * room > _BATCH_TOKENS:
                    break
                taken.add(job)
            self._waiting = [job for job in self._waiting if job not in taken]
            self._running += taken
            return [job for job in waiting if job in taken]


def _wake(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.wake.set()
