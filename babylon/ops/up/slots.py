"""Slots of Prefect's concurrency limits that nobody holds.

Prefect counts a slot in its database and keeps its lease in a file. When the disk is full, or the
server dies between the two, the slot stays counted without a lease. Nothing would ever free it, and
every later stage with a model would wait for it.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp

from babylon.ops.prefect_env import LEASE_STORAGE, PrefectApi
from babylon.ops.up.prefect_call import call

# The server writes the lease in the request that counts the slot. A supervisor that is killed again
# and again must still live long enough.
LOOK_S, UNHELD_S = 5.0, 15.0
_STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
log = logging.getLogger(__name__)


async def free_unheld_slots(home: Path, http: aiohttp.ClientSession, api: PrefectApi) -> None:
    """Free slots that were counted without a lease for a while, for ever.

    Only for the server that ``babylon up`` starts, and only if its leases are files of the home.
    """
    if not api.embedded or os.environ.get(_STORAGE, LEASE_STORAGE) != LEASE_STORAGE:
        return
    since: dict[str, float] = {}
    while True:
        try:
            since = await look_for_unheld(home, http, api, since)
        except Exception as error:  # nothing here may end the supervisor, and with it all services
            log.warning("slots without a lease cannot be looked for now: %r", error)
        await asyncio.sleep(LOOK_S)


async def look_for_unheld(
    home: Path, http: aiohttp.ClientSession, api: PrefectApi, since: dict[str, float]
) -> dict[str, float]:
    """Free the slots that were not held in all looks of ``UNHELD_S``.

    ``since``: limit id → monotonic time of the first of these looks. Return it for the next look.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    limits = await call(http, api, "POST", "v2/concurrency_limits/filter", {})
    held = await asyncio.to_thread(_held, home / "prefect" / "concurrency_leases")
    unheld = {one["id"]: one for one in limits if one["active_slots"] > held[one["id"]]}
    now = time.monotonic()
    for name, one in unheld.items():
        if now - since.get(name, now) >= UNHELD_S:
            slots = {"active_slots": held[name]}
            await call(http, api, "PATCH", f"v2/concurrency_limits/{name}", slots)
            log.info("the limit %s counted a slot without a lease: it is free again", one["name"])
    return {name: since.get(name, now) for name in unheld}


def _held(directory: Path) -> Counter[str]:
    """Return limit id → slots of the leases in a directory."""
    held: Counter[str] = Counter()
    for path in directory.glob("*.json"):
        # The index has no leases, and a lease may end meanwhile.
        with suppress(OSError, ValueError, KeyError, TypeError):
            lease = json.loads(path.read_text())
            slots = int(lease["metadata"]["slots"])
            held.update({str(limit): slots for limit in lease["resource_ids"]})
    return held
