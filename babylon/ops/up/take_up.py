"""Windows whose worker died: another run takes them up as soon as their lease has ended.

Prefect notices a dead worker after 90 seconds. Until then its run would show a form that nobody
reads, so the run is ended here, and an answer that the form got counts.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from babylon.core.windows import JUDGED_AGAIN, MAX_ATTEMPTS, parse_window_id
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.runs import ENDED, end_dead_runs
from babylon.stages.approval import IN_PREFECT, try_to_answer
from babylon.store import Store
from babylon.store.attempts import list_attempts
from babylon.store.by_hand import skip_window
from babylon.store.holds import running_hold
from babylon.store.windows import WindowRow, lost_windows

_FORM = "paused-approve-"  # begins the key of what a form got; the policy's version follows
DEPLOYMENT = "train-window/one-window"
Parameters = dict[str, Any]  # of a run of ``train_window``
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
        await _tried("lost windows cannot be looked for", _look(opening, http, api))
        if api.embedded:
            await _tried("dead runs cannot be ended", end_dead_runs(http, api))


async def _tried(problem: str, work: Awaitable[None]) -> None:
    """Log a failure: nothing here may end the supervisor, and no window may stop the others."""
    try:
        await work
    except Exception as error:
        log.warning("%s now: %r", problem, error)


async def _look(
    opening: Callable[[], AbstractAsyncContextManager[Store]],
    http: aiohttp.ClientSession,
    api: PrefectApi,
) -> None:
    async with opening() as store:
        await _take_up(store, http, api)


async def _take_up(store: Store, http: aiohttp.ClientSession, api: PrefectApi) -> None:
    if await running_hold(store):
        return
    for row in await lost_windows(store):
        problem = f"window {row.window_id} is lost and cannot be taken up"
        await _tried(problem, _take_up_one(store, http, api, row))


async def _take_up_one(
    store: Store, http: aiohttp.ClientSession, api: PrefectApi, row: WindowRow
) -> None:
    window_id, _, recipe = row.window_id.partition("+")
    if recipe == JUDGED_AGAIN:  # a run would train what its first training left out
        window = parse_window_id(row.window_id, row.minutes)
        died = f"{row.owner} died while it judged: `babylon judge again --window {window_id}`"
        await skip_window(store, window, "the supervisor", died)
        return
    parameters = await _end_dead_run(store, http, api, row)
    if row.attempts < MAX_ATTEMPTS:
        await _start_run(http, api, row, parameters)
        log.info("window %s of %s is lost: a run takes it up", row.window_id, row.owner)


async def _end_dead_run(
    store: Store, http: aiohttp.ClientSession, api: PrefectApi, row: WindowRow
) -> Parameters:
    """End the run that lost the claim: one of this window that began before it → its parameters."""
    attempts = await list_attempts(store, [row.window_id])
    claimed = next((one.began_at for one in attempts if one.epoch == row.epoch), None)
    if claimed is None:  # retention removed it: no run is that old
        return {}
    # A run by hand may have its recipe among its settings, and is named after the window alone.
    names = {row.window_id, row.window_id.partition("+")[0]}
    runs = {
        "name": {"any_": sorted(names)},
        "state": {"type": {"any_": ["RUNNING", "PAUSED", "CRASHED"]}},
        "start_time": {"before_": claimed.isoformat()},
    }
    wanted = {
        "flow_runs": runs,
        "flows": {"name": {"any_": ["train-window"]}},
        "sort": "START_TIME_DESC",
    }
    named = await call(http, api, "POST", "flow_runs/filter", wanted)
    found_runs = [run for run in named if _window_of(run["parameters"]) == row.window_id]
    for run in found_runs:
        if run["state_type"] == "CRASHED":  # Prefect, or an earlier look, has ended it
            continue
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
    return found_runs[0]["parameters"] if found_runs else {}


def _window_of(parameters: Parameters) -> str:
    """Return the id of the window that a run with these parameters claims."""
    window_id = str(parameters.get("window_id"))
    recipe = ((parameters.get("overrides") or {}).get("windows") or {}).get("recipe")
    return f"{window_id}+{recipe}" if recipe and "+" not in window_id else window_id


async def _start_run(
    http: aiohttp.ClientSession, api: PrefectApi, row: WindowRow, parameters: Parameters
) -> None:
    """Start a run of the deployment, unless the one that was started for this claim goes on.

    It has the ``parameters`` of the dead run, as far as the deployment's form takes them.
    """
    named = await call(http, api, "GET", f"deployments/name/{DEPLOYMENT}")
    form = named["parameter_openapi_schema"]["properties"]["overrides"]["properties"]
    given = parameters.get("overrides") or {}
    overrides = {
        group: {name: value for name, value in given[group].items() if name in fields["properties"]}
        for group, fields in form.items()
        if given.get(group)
    }
    overrides.setdefault("windows", {})["minutes"] = row.minutes
    run = {
        "parameters": {
            "window_id": row.window_id,
            "overrides": overrides,
            "blocks": parameters.get("blocks") or [],
        },
        "tags": ["take-up"],
    }
    for again in range(MAX_ATTEMPTS):  # a run may die before it claims the window
        key = {"idempotency_key": f"take-up/{row.window_id}/{row.epoch}/{again}"}
        started = await call(
            http, api, "POST", f"deployments/{named['id']}/create_flow_run", run | key
        )
        if started["state"]["type"] not in ENDED:
            return
