"""One window among many: its failure is a result, not the end of the others."""

import logging
from collections.abc import Sequence
from typing import Any

from babylon.core.errors import BabylonError
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.gpu_stages import Placement
from babylon.flows.train_window import train_window

log = logging.getLogger("babylon.flows")


async def attempt(
    window_id: str,
    overrides: dict[str, Any] | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one window; whatever it raises is logged and comes back as status ``failed``."""
    try:
        return await train_window(window_id, overrides, blocks, placement)
    except Exception as error:  # the loop over windows outlives any one of them
        log.error(
            "window %s failed: %s",
            window_id,
            error,
            exc_info=None if isinstance(error, BabylonError) else error,
        )
        return WindowResult(window_id=window_id, status=WindowState.FAILED, reason=str(error))
