"""Continuous: train each window after it closes, until a signal ends the process.

A plain loop and not a flow, because a run that lasts for months tells nobody anything: each window
is a ``train-window`` run of its own. Under ``babylon up`` a schedule does the same work.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from babylon.settings import Settings
from babylon.types import WindowResult
from babylon.windows import Window, window_at
from flows.attempt import attempt

log = logging.getLogger("babylon.flows")


async def continuous(
    settings: Settings, overrides: dict[str, Any] | None = None
) -> AsyncIterator[WindowResult]:
    """Yield the result of each window, ``settings.frequency`` windows at a time, oldest first."""
    current = window_at(datetime.now(UTC), settings.minutes)
    while True:
        batch = next_batch(current, settings.frequency)
        moment = due(batch, settings.grace_s)
        names = ", ".join(window.id for window in batch)
        log.info(
            "waiting for window %s, to be trained at %s UTC", names, f"{moment:%Y-%m-%d %H:%M}"
        )
        await sleep_until(moment)
        for window in batch:
            yield await attempt(window.id, overrides)
        current = batch[-1].next()


def next_batch(first: Window, frequency: int) -> list[Window]:
    """The windows that are trained together, one after the other."""
    batch = [first]
    while len(batch) < frequency:
        batch.append(batch[-1].next())
    return batch


def due(batch: list[Window], grace_s: float) -> datetime:
    """When the last one has closed and late rows have had ``grace_s`` to arrive."""
    return batch[-1].end + timedelta(seconds=grace_s)


async def sleep_until(moment: datetime) -> None:
    """In naps of a minute, so that a clock that was set or a machine that slept is noticed."""
    while (seconds := (moment - datetime.now(UTC)).total_seconds()) > 0:
        await asyncio.sleep(min(seconds, 60))
