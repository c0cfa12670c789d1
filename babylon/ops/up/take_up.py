"""Windows whose worker died: another run takes them up as soon as their lease has ended.

Prefect notices a dead worker after 90 seconds. Until then its run would show a form that nobody
reads, so the run is ended here, and an answer that the form got counts.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from babylon.core.windows import MAX_ATTEMPTS
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.runs import end_dead_runs
from babylon.stages.approval import IN_PREFECT, try_to_answer
from babylon.store import Store
from babylon.store.attempts import list_attempts
from babylon.store.holds import running_hold
from babylon.store.windows import WindowRow, lost_windows

_FORM = "paused-approve-"  # begins the key of what a form got; the policy's version follows
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
            if api.embedded:
                await end_dead_runs(http, api)
        except Exception as error:  # nothing here may end the supervisor, and with it all services
            log.warning("lost windows cannot be looked for now: %r", error)


async def _take_up(store: Store, http: aiohttp.ClientSession, api: PrefectApi) -> None:
    if await running_hold(store):
        return
    for row in await lost_windows(store):
        await _end_dead_run(store, http, api, row)
        if row.attempts < MAX_ATTEMPTS:
            await _start_run(http, api, row)
            log.info("window %s of %s is lost: a run takes it up", row.window_id, row.owner)


async def _end_dead_run(
    store: Store, http: aiohttp.ClientSession, api: PrefectApi, row: WindowRow
) -> None:
    """End the run that lost the claim: one of this window that began before it."""
    attempts = await list_attempts(store, [row.window_id])
    (claimed,) = [one.began_at for one in attempts if one.epoch == row.epoch]
    runs = {
        "name": {"any_": [row.window_id]},
        "state": {"type": {"any_": ["RUNNING", "PAUSED"]}},
        "start_time": {"before_": claimed.isoformat()},
    }
    wanted = {"flow_runs": runs, "flows": {"name": {"any_": ["train-window"]}}}
    for run in await call(http, api, "POST", "flow_runs/filter", wanted):
        path = f"flow_runs/{run['id']}"
        form = {"prefix": _FORM, "limit": 50}
        for one in await call(http, api, "POST", f"{path}/input/filter", form):
            if found := re.fullmatch(rf"{_FORM}(\d+)-response", one["key"]):
                said = json.loads(one["value"])
                answer = (bool(said["approve"]), IN_PREFECT, str(said.get("reason", "")))
                await try_to_answer(store, int(found[1]), *answer)
        ended = {"type": "CRASHED", "name": "Crashed", "message": "its worker died"}
        await call(http, api, "POST", f"{path}/set_state", {"state": ended, "force": True})
        log.info("run %s of window %s is ended: its worker died", run["id"], row.window_id)


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
