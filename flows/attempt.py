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
from babylon.stages.turn import waits_undecided
from babylon.store import Store, open_store
from babylon.store.holds import running_hold
from babylon.store.windows import get_window

log = logging.getLogger("babylon.flows")


async def attempt(
    window_id: str,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one window. Log any error and return it as a result of status ``failed``.

    A hold that began after the windows were chosen leaves those that are not begun ``ready``. One
    that another run holds by now is left to it. One that waits for an experiment stays ``scored``,
    while the reviews decide nothing.
    """
    try:
        async with open_store(await settings_with(overrides, blocks)) as store:
            unchanged = await _not_begun(store, window_id)
        return unchanged or await train_window(window_id, overrides, blocks, placement)
    except Exception as error:  # the loop over windows must survive every failure of one
        log.error(
            "window %s failed: %s",
            window_id,
            reason_of(error),
            exc_info=None if isinstance(error, BabylonError) else error,
        )
        return WindowResult(window_id=window_id, status=WindowState.FAILED, reason=reason_of(error))


async def _not_begun(store: Store, window_id: str) -> WindowResult | None:
    """Return the result of a window that is left as it is, ``None`` for one that may begin."""
    state, reason = WindowState.READY, str(await running_hold(store) or "")
    if reason:
        log.warning("window %s is not begun: %s", window_id, reason)
    elif (row := await get_window(store, window_id)) and row.leased:
        state, reason = row.state, f"{row.owner} is training it now"
        log.info("window %s is left to another run: %s", window_id, reason)
    elif reason := await waits_undecided(store, window_id):
        state = WindowState.SCORED
        log.info("window %s waits: %s", window_id, reason)
    else:
        return None
    return WindowResult(window_id=window_id, status=state, reason=reason, changed=False)
