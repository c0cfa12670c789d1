"""Prefect's database, and what its server needs: pools, block types, deployments, automations.

Everything here can be repeated. Existing pools, queues, limits and automations stay as they are.
Deployments and their schedules are made again from prefect.yaml: a change in the UI lasts until a
supervisor, or a worker of the pool ``cpu`` on another machine, starts.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import aiohttp
import asyncpg

from babylon.core.errors import DatabaseError, ServingError
from babylon.ops.prefect_env import HEARTBEAT_S, PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.services import POOLS
from babylon.store import Store
from babylon.store.address import Address, parse_url
from babylon.store.session import is_pooled

PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_TLS = "PREFECT_SERVER_DATABASE_SQLALCHEMY_CONNECT_ARGS_TLS"
DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
# On the pool ``cpu``, the first before the others when the pool is full.
QUEUED, QUEUES = "cpu", ("hourly", "by-hand", "publish")
# Global concurrency limits of the stages that ``babylon.tasks.limits`` names: one at a time, until
# somebody raises them.
LIMITS = {"babylon-gpu-memory": 1, "babylon-judge": 1}
# A run on Kubernetes is Pending until its pod runs: a node with a GPU may be made for it first.
PENDING_S = 1800
# A worker that died leaves its runs Running or Pending, and the hourly deployment's limit of one
# would refuse every later run. Three missed heartbeats show it.
_DONE = ["Completed", "Failed", "Cancelled", "Crashed"]
STALE_RUNS = {
    "babylon: crash runs without a heartbeat": (
        "heartbeat",
        ["heartbeat", *_DONE],
        3 * HEARTBEAT_S,
    ),
    "babylon: crash runs stuck in pending": ("Pending", ["Running", *_DONE], PENDING_S),
}


async def prefect_database(store: Store, url: str) -> dict[str, str]:
    """Create Prefect's database beside ours unless it exists. Return the variables that name it.

    ``url`` is the address of ours. PREFECT_SERVER_DATABASE_CONNECTION_URL names another database.

    Raises:
        DatabaseError: the account may not create it, or a pooler is in between.
    """
    if given := os.environ.get(PREFECT_DATABASE):
        return {PREFECT_DATABASE: given}
    address = parse_url(url)
    async with store.pool.acquire() as connection:
        if await is_pooled(connection) or len(address.hosts) > 1:
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
    return _named(address, name)


def _named(address: Address, name: str) -> dict[str, str]:
    """Return the variables that tell Prefect's server a database at our address.

    SQLAlchemy's URL has no place for certificates: Prefect has settings for them.
    """
    parts = urlsplit(address.dsn)
    asked = dict(parse_qsl(parts.query))
    query: dict[str, str] = {}
    query |= {one: asked[one] for one in ("user", "password", "passfile") if one in asked}
    ((host, port),) = address.hosts
    netloc = parts.netloc
    if host.startswith("/"):  # the directory of a Unix socket
        query |= {"host": host, "port": str(port)}
    elif host:
        netloc += f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    tls: dict[str, str] = {}
    mode = asked.get("sslmode")
    if address.ssl is not None or mode in ("verify-ca", "verify-full"):
        files = {"CA_FILE": "sslrootcert", "CERT_FILE": "sslcert", "KEY_FILE": "sslkey"}
        tls = {key: os.path.abspath(asked[one]) for key, one in files.items() if one in asked}
        tls |= {"ENABLED": "true", "CHECK_HOSTNAME": str(mode != "verify-ca").lower()}
    elif mode:
        query["ssl"] = mode
    place = f"postgresql+asyncpg://{netloc}/{quote(name)}"
    return {
        PREFECT_DATABASE: f"{place}?{urlencode(query)}" if query else place,
        **{f"{_TLS}_{key}": value for key, value in tls.items()},
    }


async def create_pools(http: aiohttp.ClientSession, api: PrefectApi) -> None:
    """Create the missing work pools and their queues. Call it before the workers start: two that
    create the same pool collide.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    for name in POOLS.keys() - await _names(http, api, "work_pools/filter"):
        pool = {"name": name, "type": "process", "concurrency_limit": POOLS[name]}
        await call(http, api, "POST", "work_pools/", pool)
    missing = set(QUEUES) - await _names(http, api, f"work_pools/{QUEUED}/queues/filter")
    for priority, name in enumerate(QUEUES, start=1):
        if name in missing:
            queue = {"name": name, "priority": priority}
            await call(http, api, "POST", f"work_pools/{QUEUED}/queues/", queue)


async def set_up_prefect(
    http: aiohttp.ClientSession, api: PrefectApi, environment: Mapping[str, str]
) -> None:
    """Create limits and automations, register block types and apply prefect.yaml.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    for name in LIMITS.keys() - await _names(http, api, "v2/concurrency_limits/filter"):
        limit = {"name": name, "limit": LIMITS[name]}
        await call(http, api, "POST", "v2/concurrency_limits/", limit)
    automations = [_automation(name, *about) for name, about in STALE_RUNS.items()]
    await create_automations(http, api, automations)
    await _apply_deployments(environment)


async def create_automations(
    http: aiohttp.ClientSession, api: PrefectApi, wanted: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Create the missing automations. Return the existing ones by name."""
    found = await call(http, api, "POST", "automations/filter", {})
    existing = {one["name"]: one for one in found}
    for automation in wanted:
        if automation["name"] not in existing:
            await call(http, api, "POST", "automations/", automation)
    return existing


async def _names(http: aiohttp.ClientSession, api: PrefectApi, path: str) -> set[str]:
    return {one["name"] for one in await call(http, api, "POST", path, {})}


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


async def _apply_deployments(environment: Mapping[str, str]) -> None:
    """Register block types and apply prefect.yaml in a process of its own, which imports Prefect.

    Raises:
        ServingError: it failed; the message quotes its output.
    """
    command = ("-m", "babylon.blocks.register", "--no-prompt", "deploy", "--all")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", *command, "--prefect-file", str(DEPLOYMENTS)),
        cwd=DEPLOYMENTS.parent,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise ServingError(
            f"block types and deployments: Prefect failed:\n{output.decode()[-2000:]}"
        )
