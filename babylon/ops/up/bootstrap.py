"""What a Prefect server needs around its workers: pools, block types, deployments, two automations.

All of it is repeatable. Pools and automations that exist are kept as they are. Deployments and
their schedules are made again from prefect.yaml, which is their truth: a change in the UI lasts
until the next ``babylon up``.
"""

import asyncio
from typing import Any

import aiohttp

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.ops.prefect_env import api_url
from babylon.ops.up.services import POOLS, ROOT, environment, prefect

_TIMEOUT = aiohttp.ClientTimeout(total=60)  # a busy Prefect lets writers wait

# A worker that died leaves its runs Running or Pending, and the hourly deployment's limit of one
# would then refuse every later run. Three missed heartbeats (180 s each), ten minutes of waiting.
_DONE = ["Completed", "Failed", "Cancelled", "Crashed"]
STALE_RUNS = {
    "babylon: crash runs without a heartbeat": ("heartbeat", ["heartbeat", *_DONE], 540),
    "babylon: crash runs stuck in pending": ("Pending", ["Running", *_DONE], 600),
}


async def create_pools(settings: Settings, http: aiohttp.ClientSession) -> None:
    """Before the workers start, which would else create them at the same moment and collide.

    Raises:
        ServingError: Prefect refused; quotes what it said.
    """
    api = api_url(settings.prefect.port)
    existing = await _call(http, "POST", f"{api}/work_pools/filter", {})
    for name in POOLS.keys() - {pool["name"] for pool in existing}:
        pool = {"name": name, "type": "process", "concurrency_limit": POOLS[name]}
        await _call(http, "POST", f"{api}/work_pools/", pool)


async def bootstrap(settings: Settings, http: aiohttp.ClientSession) -> None:
    """
    Raises:
        ServingError: Prefect refused; quotes what it said.
    """
    api = api_url(settings.prefect.port)
    await _crash_stale_runs(http, api)
    await _prefect(settings, "block", "register", "--module", "babylon.blocks.load")
    await _prefect(settings, "deploy", "--all")


async def _crash_stale_runs(http: aiohttp.ClientSession, api: str) -> None:
    existing = await _call(http, "POST", f"{api}/automations/filter", {})
    names = {automation["name"] for automation in existing}
    for name, (after, expected, within_s) in STALE_RUNS.items():
        if name not in names:
            automation = _automation(name, after, expected, within_s)
            await _call(http, "POST", f"{api}/automations/", automation)


def _automation(name: str, after: str, expected: list[str], within_s: int) -> dict[str, Any]:
    return {
        "name": name,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "for_each": ["prefect.resource.id"],
            "after": [f"prefect.flow-run.{after}"],
            "expect": [f"prefect.flow-run.{event}" for event in expected],
            "threshold": 1,
            "within": within_s,
        },
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "message": name}],
    }


async def _prefect(settings: Settings, *arguments: str) -> None:
    """Prefect's own command line, in the checkout that has ``prefect.yaml`` and ``blocks``."""
    if not (ROOT / "prefect.yaml").exists():
        raise ServingError(
            f"no prefect.yaml in {ROOT}: `babylon up` runs from a checkout; install it with"
            " `pip install -e .`"
        )
    child = await asyncio.create_subprocess_exec(
        *prefect("--no-prompt", *arguments),
        cwd=ROOT,
        env=environment(settings) | {"PWD": str(ROOT)},  # prefect.yaml names it
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise ServingError(f"`prefect {' '.join(arguments)}` failed:\n{output.decode()[-2000:]}")


async def _call(http: aiohttp.ClientSession, method: str, url: str, body: Any) -> Any:
    try:
        async with http.request(method, url, json=body, timeout=_TIMEOUT) as response:
            if response.status >= 400:
                raise ServingError(
                    f"Prefect refused {method} {url}: {response.status} {await response.text()}"
                )
            return await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServingError(
            f"Prefect does not answer {method} {url} ({error or type(error).__name__}):"
            " `babylon down`, then `babylon up` starts it again"
        ) from error
