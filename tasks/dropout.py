"""Dropout: thin a large window before the judge sees it, and never a group below two."""

import asyncio

from babylon.dropout import thin_window
from babylon.settings import Settings
from babylon.types import Thinned, Validated
from tasks.stage import stage


@stage("dropout")
async def dropout(settings: Settings, validated: Validated) -> Thinned:
    """Seeded, so a repeated run keeps the same trajectories."""
    return await asyncio.to_thread(thin_window, settings, validated)
