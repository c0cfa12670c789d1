"""Windows whose worker died: another run takes them up as soon as their lease has ended."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from babylon.core.windows import MAX_ATTEMPTS
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.store import Store
from babylon.store.holds import running_hold
from babylon.store.windows import WindowRow, lost_windows

DEPLOYMENT = "train-window/one-window"
log = logging.getLogger(__name__)


async def take_up_lost(
    opening: Callable[[], AbstractAsyncContextManager[Store]],
    lease_s: float,
    http: aiohttp.ClientSession,
    api: PrefectApi,
) -> None:
    """Look twice in a lease for windows that nobody works on any more, for ever."""
    while True:
        await asyncio.sleep(lease_s / 2)
        try:
            async with opening() as store:
                await _take_up(store, http, api)
        except Exception as error:  # nothing here may end the supervisor, and with it all services
            log.warning("lost windows cannot be looked for now: %r", error)


async def _take_up(store: Store, http: aiohttp.ClientSession, api: PrefectApi) -> None:
    if await running_hold(store):
        return
    for row in await lost_windows(store):
        if row.attempts < MAX_ATTEMPTS:
            await _start_run(http, api, row)
            log.info("window %s of %s is lost: a run takes it up", row.window_id, row.owner)


async def _start_run(http: aiohttp.ClientSession, api: PrefectApi, row: WindowRow) -> None:
    """Start a run of the deployment, once for each claim that was lost."""
    named = await call(http, api, "GET", f"deployments/name/{DEPLOYMENT}")
    run = {
        "parameters": {
            "window_id": row.window_id,
            "overrides": {"windows": {"minutes": row.minutes}},
        },
        "idempotency_key": f"take-up/{row.window_id}/{row.epoch}",
        "tags": ["take-up"],
    }
    await call(http, api, "POST", f"deployments/{named['id']}/create_flow_run", run)
