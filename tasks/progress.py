"""Progress of a stage: to the terminal's listener, as an artifact in Prefect, and as log lines."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.context import TaskRunContext
from prefect.runtime import flow_run

from babylon.core.processes import in_background

FRESH_S = 4.0  # so that what the page shows is less than five seconds old
LINE_S = 30.0

Listener = Callable[[str, str, int, int], None]
listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
"""Called with (flow run, stage, done, total) when a stage starts or advances."""
log = logging.getLogger("babylon.flows")


@dataclass(slots=True)
class Steps:
    """Steps of the running stage. ``total`` is 0 while nobody counts them."""

    stage: str
    began: float
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        counted = f" {self.done} of {self.total}," if self.total else ""
        return f"{self.stage}:{counted} {time.monotonic() - self.began:.0f} s so far"


_steps: ContextVar[Steps | None] = ContextVar("steps", default=None)


def announce(stage: str, done: int = 0, total: int = 0) -> None:
    """Report progress, also from a thread that the stage started."""
    if (steps := _steps.get()) is not None and steps.stage == stage:
        steps.done, steps.total = done, total
    if (hear := listener.get()) is not None:
        hear(flow_run.name or "", stage, done, total)


@asynccontextmanager
async def shown(stage: str) -> AsyncIterator[None]:
    """Show the progress of the block, if it takes longer than ``FRESH_S``."""
    steps = Steps(stage, time.monotonic())
    token = _steps.set(steps)
    try:
        async with in_background(_show(steps)):
            yield
    finally:
        _steps.reset(token)


async def _show(steps: Steps) -> None:
    """Keep one progress artifact fresh. It has no key, so it is on the page of its run only."""
    artifact: UUID | None = None
    said = steps.began
    while True:
        await asyncio.sleep(FRESH_S)
        if time.monotonic() - said >= LINE_S:
            said = time.monotonic()
            log.info("%s", steps, extra={"progress": True})
        if TaskRunContext.get() is None:  # called without Prefect
            continue
        share = 100 * steps.done / steps.total if steps.total else 0.0
        try:
            if artifact is None:
                artifact = await acreate_progress_artifact(share, description=str(steps))
            else:
                await aupdate_progress_artifact(artifact, share, description=str(steps))
        except Exception as error:  # a page must never end the stage that it shows
            log.debug("the progress of %s was not shown: %r", steps.stage, error)
