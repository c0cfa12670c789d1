"""One window of many: its failure is a result and does not stop the others."""

import logging
from collections.abc import Sequence

from babylon.blocks.form import Overrides
from babylon.core.errors import BabylonError, reason_of
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.gpu_stage import Placement
from babylon.flows.train_window import train_window

log = logging.getLogger("babylon.flows")


async def attempt(
    window_id: str,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one window. Log any error and return it as a result of status ``failed``."""
    try:
        return await train_window(window_id, overrides, blocks, placement)
    except Exception as error:  # the loop over windows must survive every failure of one
        log.error(
            "window %s failed: %s",
            window_id,
            reason_of(error),
            exc_info=None if isinstance(error, BabylonError) else error,
        )
        return WindowResult(window_id=window_id, status=WindowState.FAILED, reason=reason_of(error))
