"""The end of a window: its final state, its metrics, and the result for the caller."""

import time

from babylon.core.metrics import window_metrics
from babylon.core.types import Deployed, Scored, Trained, Verdict, WindowResult
from babylon.core.windows import Window, WindowState
from babylon.store import Store
from babylon.store.late import count_late, note_late
from babylon.store.windows import get_window, set_state


async def finish_window(
    store: Store,
    window: Window,
    scored: Scored,
    trained: Trained,
    verdict: Verdict,
    deployed: Deployed,
    *,
    started: float,
) -> WindowResult:
    """Store the final state with all metrics. ``started``: ``time.monotonic()`` of the run.

    Raises:
        FencedError: another worker took over the window.
    """
    await note_late(store, window.start, window.end)
    metrics = {
        **window_metrics(scored, trained, verdict, deployed),
        "late": await count_late(store, window.id),
        "duration_minutes": (time.monotonic() - started) / 60,
    }
    state = WindowState.DEPLOYED if deployed.deployed else WindowState.REJECTED
    await set_state(store, scored.claim, state, reason=deployed.reason, metrics=metrics)
    return WindowResult(window_id=window.key, status=state, reason=deployed.reason, metrics=metrics)


async def earlier_result(store: Store, window: Window, reason: str) -> WindowResult:
    """Return the stored result of a window that an earlier run finished."""
    row = await get_window(store, window.key)
    assert row is not None  # it is done, so it has a row
    return WindowResult(
        window_id=window.key, status=row.state, reason=reason, changed=False, metrics=row.metrics
    )
