"""Continuous training: each window after it closes, until a signal ends the process.

This is a plain loop and not a flow, because a flow run that lasts for months shows nothing: each
window is a ``train-window`` run of its own. Under ``babylon up`` a schedule does the same work.
"""

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count

from babylon.blocks.load import Overrides
from babylon.core.settings import Settings, WindowSettings, load_settings
from babylon.core.types import WindowResult
from babylon.core.windows import Window, sleep_until, window_at
from babylon.flows.attempt import attempt
from babylon.stages.pending import pending_windows
from babylon.store import open_store
from babylon.store.connection import UNREACHABLE
from babylon.store.database_clock import read_clock

log = logging.getLogger("babylon.flows")


async def continuous(
    overrides: Overrides | None = None,
) -> AsyncIterator[WindowResult]:
    """Train the windows that are ready, oldest first, and yield each result.

    Look for windows at once, then whenever another ``frequency`` windows have closed by the
    database's clock. A window that fails is tried again at a later look.

    Raises:
        DatabaseError, OSError: the database is unreachable at the start. Later this is logged.
    """
    settings = load_settings(**(overrides or {}))
    ahead = timedelta(0)  # of this machine's clock
    for look in count():
        looked = datetime.now(UTC)
        try:
            waiting, now = await _waiting(settings)
            ahead = datetime.now(UTC) - now
        except UNREACHABLE as error:
            if look == 0:
                raise
            log.error("the database is unreachable, no window was trained: %s", error)
            waiting = []
        for window in waiting:
            yield await attempt(window.key, overrides)
        settled = looked - ahead - timedelta(seconds=settings.windows.grace_s)
        moment = next_look(settings.windows, settled) + ahead
        if look == 0:  # look again soon: a run that died just before may still hold a lease
            moment = min(moment, datetime.now(UTC) + timedelta(seconds=settings.windows.lease_s))
        log.info("next look at %s UTC", f"{moment:%Y-%m-%dT%H:%M:%S}")
        await sleep_until(moment)


async def _waiting(settings: Settings) -> tuple[list[Window], datetime]:
    """Return the windows that are ready, and the database's time."""
    async with open_store(settings) as store:
        clock = await read_clock(store)
        return await pending_windows(store, settings, clock=clock), clock.now


def next_look(windows: WindowSettings, settled: datetime) -> datetime:
    """Return the close of ``frequency`` windows, the first of which holds ``settled``, plus grace.

    Rows up to ``settled`` have arrived already; late ones get ``grace_s`` more.
    """
    first = window_at(settled, windows.minutes)
    span = timedelta(minutes=windows.minutes * windows.frequency)
    return first.start + span + timedelta(seconds=windows.grace_s)
