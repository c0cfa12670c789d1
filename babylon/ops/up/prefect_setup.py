"""Prefect's database, and what its server needs: pools, block types, deployments, automations.

Everything here can be repeated. Existing pools and automations stay as they are. Deployments and
their schedules are made again from prefect.yaml: a change in the UI lasts until the next
``babylon up``.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

import aiohttp
import asyncpg

from babylon.core.errors import DatabaseError, ServingError
from babylon.ops.up.services import POOLS, prefect
from babylon.store import Store
from babylon.store.session import is_pooled

PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
_TIMEOUT = aiohttp.ClientTimeout(total=60)  # a busy Prefect lets writers wait

# A worker that died leaves its runs Running or Pending, and the hourly deployment's limit of one
# would refuse every later run. 540 s are three missed heartbeats (180 s each).
_DONE = ["Completed", "Failed", "Cancelled", "Crashed"]
STALE_RUNS = {
    "babylon: crash runs without a heartbeat": ("heartbeat", ["heartbeat", *_DONE], 540),
    "babylon: crash runs stuck in pending": ("Pending", ["Running", *_DONE], 600),
}


async def prefect_database(store: Store, url: str) -> str:
    """Create Prefect's database beside ours unless it exists. Return its URL for SQLAlchemy.

    ``url`` is the address of ours. PREFECT_SERVER_DATABASE_CONNECTION_URL names another database.

    Raises:
        DatabaseError: the account may not create it, or a pooler is in between.
    """
    if given := os.environ.get(PREFECT_DATABASE):
        return given
    async with store.pool.acquire() as connection:
        if await is_pooled(connection) or "," in urlsplit(url).netloc:
            raise DatabaseError(
                "Prefect's server prepares statements, which a pooler in transaction mode loses,"
                f" and knows one host only: set {PREFECT_DATABASE} to a direct address"
                " (postgresql+asyncpg://USER:PASSWORD@HOST/NAME)"
            )
    # A database of its own, because Prefect's migrations own the whole of it.
    name = f"{await store.pool.fetchval('SELECT current_database()')}_prefect"
    try:
        if not await store.pool.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", name):
            await store.pool.execute('CREATE DATABASE "{}"'.format(name.replace('"', '""')))
    except asyncpg.InsufficientPrivilegeError as error:
        raise DatabaseError(
            f"the account may not create the database {name} for Prefect: create it for the"
            f" account, or set {PREFECT_DATABASE} (postgresql+asyncpg://...)"
        ) from error
    parts = urlsplit(url)
    mode = dict(parse_qsl(parts.query)).get("sslmode")
    query = f"ssl={mode}" if mode else ""
    return urlunsplit(
        parts._replace(scheme="postgresql+asyncpg", path=f"/{quote(name)}", query=query)
    )


async def create_pools(http: aiohttp.ClientSession, api: str) -> None:
    """Create the missing work pools. Call it before the workers start: two that create the same
    pool collide.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    existing = await _call(http, "POST", f"{api}/work_pools/filter", {})
    for name in POOLS.keys() - {pool["name"] for pool in existing}:
        pool = {"name": name, "type": "process", "concurrency_limit": POOLS[name]}
        await _call(http, "POST", f"{api}/work_pools/", pool)


async def set_up_prefect(
    http: aiohttp.ClientSession, api: str, environment: Mapping[str, str]
) -> None:
    """Create automations, register block types and apply prefect.yaml.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    await _crash_stale_runs(http, api)
    await _prefect(environment, "block", "register", "--module", "babylon.blocks.load")
    await _prefect(environment, "deploy", "--all", "--prefect-file", str(DEPLOYMENTS))


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


async def _prefect(environment: Mapping[str, str], *arguments: str) -> None:
    """Run a ``prefect`` command; a failure is a ``ServingError`` that quotes its output."""
    child = await asyncio.create_subprocess_exec(
        *prefect("--no-prompt", *arguments),
        cwd=DEPLOYMENTS.parent,
        env=dict(environment),
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
