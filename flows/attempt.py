"""One window of many: its failure is a result and does not stop the others."""

import logging
from collections.abc import Sequence

from babylon.blocks.form import Overrides
from babylon.blocks.load import settings_with
from babylon.core.errors import BabylonError, reason_of
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.gpu_stage import Placement
from babylon.flows.train_window import train_window
from babylon.store import open_store
from babylon.store.holds import running_hold

log = logging.getLogger("babylon.flows")


async def attempt(
    window_id: str,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one window. Log any error and return it as a result of status ``failed``.

    A hold that began after the windows were chosen leaves those that are not begun ``ready``.
    """
    try:
        async with open_store(await settings_with(overrides, blocks)) as store:
            holding = await running_hold(store)
        if holding:
            log.warning("window %s is not begun: %s", window_id, holding)
            return WindowResult(
                window_id=window_id, status=WindowState.READY, reason=str(holding), changed=False
            )
        return await train_window(window_id, overrides, blocks, placement)
    except Exception as error:  # the loop over windows must survive every failure of one
        log.error(
            "window %s failed: %s",
            window_id,
            reason_of(error),
            exc_info=None if isinstance(error, BabylonError) else error,
        )
        return WindowResult(window_id=window_id, status=WindowState.FAILED, reason=reason_of(error))
