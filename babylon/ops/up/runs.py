"""Runs on this machine that outlived their worker, and runs in Prefect that outlived their process.

A killed worker leaves its runs working, without a parent. When both die, nobody tells Prefect, and
the dead run of a deployment with a limit of one keeps later runs out for minutes.
"""

import logging
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.services import POOLS

Run = dict[str, Any]  # of Prefect's API
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")  # a run of Prefect
log = logging.getLogger(__name__)
UNSEEN = timedelta(seconds=60)  # a worker takes a run, and starts its process seconds later
_GRACE_S = 15.0


def run_processes(home: Path | None = None) -> dict[str, list[psutil.Process]]:
    """Return flow run id → processes on this machine; ``home``: only those of that home."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to somebody else
            about = process.environ()
            run = about.get("PREFECT__FLOW_RUN_ID")
            if run and (home is None or about.get("BABYLON_HOME") == str(home)):
                found.setdefault(run, []).append(process)
    return found


def stop_runs(home: Path) -> int:
    """End the runs of a home whose workers are gone. Return the number of processes.

    A run that gets SIGTERM gives its window back, so that another run may begin it at once.
    """
    left = [one for processes in run_processes(home).values() for one in processes]
    end(left)
    return len(left)


def own_runs() -> list[psutil.Process]:
    """Return the processes of the runs of this process's workers, while those live."""
    ours = {one.pid for one in psutil.Process().children(recursive=True)}
    return [one for found in run_processes().values() for one in found if one.pid in ours]


def end(processes: Collection[psutil.Process]) -> None:
    """Send SIGTERM, and SIGKILL to those that do not end in time."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def end_dead_runs(http: aiohttp.ClientSession, api: PrefectApi) -> None:
    """Mark the runs of our pools as crashed that have had no process for a minute.

    Runs in the process of one that has ended are marked too, unless they wait for a person. Only
    for the server that ``babylon up`` starts: its workers all are on this machine.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    wanted = {
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}},
        "work_pools": {"name": {"any_": list(POOLS)}},
    }
    runs = await call(http, api, "POST", "flow_runs/filter", wanted)
    old = {one["id"] for one in runs if _age(one) > UNSEEN}
    for run in _without_process(old):
        path = f"flow_runs/{run}"
        # A run that ended in order told Prefect so before its process ended.
        now = await call(http, api, "GET", path)
        if now["state_type"] not in ("PENDING", "RUNNING", "CANCELLING") or _age(now) <= UNSEEN:
            continue
        await _end(http, api, now)
    for orphan in await _orphans(http, api):
        await _end(http, api, orphan)


async def _orphans(http: aiohttp.ClientSession, api: PrefectApi) -> list[Run]:
    """Return the runs in the process of a run that has ended."""

    async def found(asked: dict[str, Any]) -> list[Run]:
        runs: list[Run] = await call(http, api, "POST", "flow_runs/filter", asked)
        return runs

    running = {
        "state": {"type": {"any_": ["RUNNING"]}},
        "deployment_id": {"is_null_": True},  # others have a process of their own
    }
    called = await found({"flow_runs": running | {"parent_task_run_id": {"is_null_": False}}})
    if not called:
        return []
    calls = {"id": {"any_": [run["parent_task_run_id"] for run in called]}}
    ended = {"state": {"type": {"any_": list(ENDED)}}}
    callers = await found({"task_runs": calls, "flow_runs": ended})
    dead = [run["id"] for run in callers if _age(run) > UNSEEN]
    if not dead:
        return []
    return await found({"flow_runs": running | {"parent_flow_run_id": {"any_": dead}}})


async def _end(http: aiohttp.ClientSession, api: PrefectApi, run: Run) -> None:
    ended = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    path = f"flow_runs/{run['id']}/set_state"
    await call(http, api, "POST", path, {"state": ended, "force": True})
    log.info("run %s is ended: its process is gone", run["name"])


def _without_process(runs: Collection[str]) -> list[str]:
    return sorted(set(runs) - run_processes().keys()) if runs else []


def _age(run: Run) -> timedelta:
    return datetime.now(UTC) - datetime.fromisoformat(run["state"]["timestamp"])
