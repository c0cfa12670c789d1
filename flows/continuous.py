"""Continuous: train each window after it closes, until a signal ends the process.

A plain loop and not a flow, because a run that lasts for months tells nobody anything: each window
is a ``train-window`` run of its own. Under ``babylon up`` a schedule does the same work.
"""

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import Window, sleep_until, window_at
from babylon.flows.attempt import attempt
from babylon.stages.pending import pending_windows
from babylon.store import open_store
from babylon.store.connection import UNREACHABLE, read_clock

log = logging.getLogger("babylon.flows")


async def continuous(
    settings: Settings, overrides: dict[str, Any] | None = None
) -> AsyncIterator[WindowResult]:
    """Yield the result of each window that waits, oldest first: now, and whenever another
    ``frequency`` windows have closed by the database's clock. A window that fails is tried again
    at a later look.

    Raises:
        DatabaseError, OSError: the database is away at the start; later that is only logged.
    """
    ahead = timedelta(0)  # of this machine's clock
    for look in count():
        looked = datetime.now(UTC)
        try:
            waiting, now = await _waiting(settings)
            ahead = datetime.now(UTC) - now
        except UNREACHABLE as error:
            if look == 0:
                raise
            log.error("the database is away, no window was trained: %s", error)
            waiting = []
        for window in waiting:
            yield await attempt(window.key, overrides)
        settled = looked - ahead - timedelta(seconds=settings.windows.grace_s)
        moment = next_look(settings, settled) + ahead
        if look == 0:  # soon again: a run that died just before this one still holds its lease
            moment = min(moment, datetime.now(UTC) + timedelta(seconds=settings.windows.lease_s))
        log.info("next look at %s UTC", f"{moment:%Y-%m-%dT%H:%M:%S}")
        await sleep_until(moment)


async def _waiting(settings: Settings) -> tuple[list[Window], datetime]:
    """The windows, and what time it is in the database."""
    async with open_store(settings) as store:
        clock = await read_clock(store)
        return await pending_windows(store, settings, clock=clock), clock.now


def next_look(settings: Settings, settled: datetime) -> datetime:
    """When ``frequency`` windows, from the one that holds ``settled`` on, have closed and late rows
    have had ``grace_s`` to arrive. Rows up to ``settled`` are there already."""
    first = window_at(settled, settings.windows.minutes)
    span = timedelta(minutes=settings.windows.minutes * settings.windows.frequency)
    return first.start + span + timedelta(seconds=settings.windows.grace_s)
