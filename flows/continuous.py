"""Continuous training: each window after it closes, until a signal ends the process.

This is a plain loop and not a flow, because a flow run that lasts for months shows nothing: each
window is a ``train-window`` run of its own. Under ``babylon up`` a schedule does the same work.
"""

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count

from babylon.blocks.form import Overrides
from babylon.core.settings import WindowSettings
from babylon.core.settings_loading import load_settings
from babylon.core.types import WindowResult
from babylon.core.windows import last_complete_window, sleep_until, window_at
from babylon.flows.attempt import attempt
from babylon.stages.pending import pending_windows
from babylon.store import open_store
from babylon.store.connection import UNREACHABLE, read_clock
from babylon.store.market_outcomes import awaits_outcomes
from babylon.tasks.experiment import review_running
from babylon.tasks.retire import retention_is_due, retire
from babylon.tasks.stage import run_after

log = logging.getLogger("babylon.flows")
AWAITING_S = 60.0  # between looks while market outcomes or the database are awaited


async def continuous(
    overrides: Overrides | None = None,
) -> AsyncIterator[WindowResult]:
    """Train the windows that are ready, oldest first, and yield each result.

    Look for windows at once, then whenever another ``frequency`` windows have closed by the
    database's clock. While the last window waits for its market outcomes, or the database is away,
    look every minute. A window that fails is tried again at a later look.

    Raises:
        DatabaseError, OSError: the database is unreachable at the start. Later this is logged.
    """
    settings = load_settings(**(overrides or {}))
    ahead = timedelta(0)  # of this machine's clock
    for look in count():
        looked = datetime.now(UTC)
        try:
            async with open_store(settings) as store:
                # Also while training is on hold, when no window's run does it.
                await review_running(store, settings.windows, settings.experiment)
                clock = await read_clock(store)
                waiting = await pending_windows(
                    store, settings.windows, settings.quality, clock=clock
                )
                last = last_complete_window(clock.now, settings.windows.minutes)
                awaited = await awaits_outcomes(
                    store, last, clock.now, settings.windows.outcomes_wait_s
                )
            ahead = datetime.now(UTC) - clock.now
        except UNREACHABLE as error:
            if look == 0:
                raise
            log.error("the database is unreachable, no window was trained: %s", error)
            waiting, awaited = [], "the database"
        for window in waiting:
            yield await attempt(window.key, overrides)
        if retention_is_due(settings.home):  # not only after a window that ends
            await run_after("the look", retire, settings)
        settled = looked - ahead - timedelta(seconds=settings.windows.grace_s)
        moment = next_look(settings.windows, settled) + ahead
        if awaited:
            moment = min(moment, datetime.now(UTC) + timedelta(seconds=AWAITING_S))
        if look == 0:  # look again soon: a run that died just before may still hold a lease
            moment = min(moment, datetime.now(UTC) + timedelta(seconds=settings.windows.lease_s))
        log.info("next look at %s UTC", f"{moment:%Y-%m-%dT%H:%M:%S}")
        await sleep_until(moment)


def next_look(windows: WindowSettings, settled: datetime) -> datetime:
    """Return the close of ``frequency`` windows, the first of which holds ``settled``, plus grace.

    Rows up to ``settled`` have arrived already; late ones get ``grace_s`` more.
    """
    first = window_at(settled, windows.minutes)
    span = timedelta(minutes=windows.minutes * windows.frequency)
    return first.start + span + timedelta(seconds=windows.grace_s)
