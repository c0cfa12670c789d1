"""The end of a window's run: its name in Prefect, its last line, and its pages."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from prefect.states import Completed

from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.ops.pages.stage_lines import stage_lines
from babylon.store import Store
from babylon.tasks.page import leave_pages
from babylon.tasks.stage import run_after

NAMES = {
    WindowState.DEPLOYED: "Deployed",
    WindowState.REJECTED: "Rejected",
    WindowState.SKIPPED: "Skipped",
    WindowState.SCORED: "Waiting",  # for the decision of an experiment
}
log = logging.getLogger("babylon.flows")


@asynccontextmanager
async def with_pages(store: Store, window_id: str) -> AsyncIterator[None]:
    """Leave the window's pages after the block, also after an error, but not after a signal."""
    try:
        yield
    except Exception:
        await run_after(window_id, leave_pages, store, window_id)
        raise
    await run_after(window_id, leave_pages, store, window_id)


def named(result: WindowResult) -> WindowResult:
    """Return a result from a flow, so that its run ends as ``Deployed``, ``Rejected`` or the like.

    Prefect takes the state of the run from a returned state, and hands the result to the caller.
    """
    for line in stage_lines(result):
        log.info("%s", line)
    name = NAMES.get(WindowState(result.status), "Completed")
    return cast(WindowResult, Completed(name=name, message=result.reason, data=result))
