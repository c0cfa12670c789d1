"""Waiting for a moment of the real clock."""

import asyncio
from datetime import UTC, datetime

_NAP_S = 60


async def sleep_until(moment: datetime) -> None:
    """In naps of a minute, so that a clock that was set or a machine that slept is noticed."""
    while (seconds := (moment - datetime.now(UTC)).total_seconds()) > 0:
        await asyncio.sleep(min(seconds, _NAP_S))
