"""Freshness: does play still arrive?"""

from datetime import datetime, timedelta

from babylon.core.settings import WindowSettings
from babylon.core.windows import Clock


def stale_play(newest: datetime | None, windows: WindowSettings, clock: Clock) -> str:
    """Return the alarm if no play began for long; empty while play arrives.

    A row is written when its trajectory ends, so two windows must pass. Play older than the
    lookback is a recording and not a live fleet.
    """
    if newest is None:
        return ""
    age = clock.now - newest
    limit = max(timedelta(hours=windows.freshness_hours), timedelta(minutes=2 * windows.minutes))
    if not limit < age < timedelta(hours=windows.lookback_hours):
        return ""
    hours = age.total_seconds() / 3600
    return (
        f"no play began since {newest:%Y-%m-%dT%H:%M} UTC, {hours:.1f} h ago (FRESHNESS_HOURS): do"
        " the agents and the recorder still run?"
    )
