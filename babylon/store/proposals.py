"""The table ``proposals``: gateways load a proposed policy before a route names it.

Agents are not served by a proposed policy until a route names it. The author renews the proposal;
when the author dies, the proposal expires.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from babylon.core.errors import reason_of
from babylon.core.failpoints import failpoint
from babylon.store.connection import UNREACHABLE, Store, affected
from babylon.store.policies import lock_routes
from babylon.store.routes import CHANNEL, require_present

log = logging.getLogger(__name__)
RENEW_S = 10.0
_LASTS = timedelta(seconds=6 * RENEW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A row of ``babylon.proposals``; ``outcome`` is ``None`` while it is open."""

    proposal_id: int
    policy_version: int
    author: str
    created_at: datetime
    open_until: datetime
    outcome: str | None


async def open_proposals(store: Store) -> list[Proposal]:
    """Return the proposals that are neither closed nor expired, oldest first."""
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.proposals WHERE outcome IS NULL AND open_until > now()"
        " ORDER BY proposal_id"
    )
    return [Proposal(**row) for row in rows]


@asynccontextmanager
async def proposed(
    store: Store, policy_version: int, author: str, purpose: str = "committed"
) -> AsyncIterator[int]:
    """Open a proposal and renew it while the block runs; yield its id.

    Its outcome is ``purpose``, or the reason of the error that the block raised.

    Raises:
        ModelError: there is no such policy, or its checkpoint was removed.
    """
    proposal_id = await _open(store, policy_version, author)
    failpoint("proposal.opened")
    renewing = asyncio.create_task(_renew(store, proposal_id))
    outcome = "given up"
    try:
        yield proposal_id
        outcome = purpose
    except Exception as error:
        outcome = reason_of(error)  # other libraries quote prompts and keys
        raise
    finally:
        renewing.cancel()
        (ended,) = await asyncio.gather(renewing, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("renewing proposal %d failed", proposal_id, exc_info=ended)
        await _close(store, proposal_id, outcome)


async def _open(store: Store, policy_version: int, author: str) -> int:
    async with store.pool.acquire() as connection, connection.transaction():
        await lock_routes(connection)
        await require_present(connection, policy_version)
        proposal_id: int = await connection.fetchval(
            "INSERT INTO babylon.proposals (policy_version, author, open_until)"
            " VALUES ($1, $2, now() + $3::interval) RETURNING proposal_id",
            policy_version,
            author,
            _LASTS,
        )
        await connection.execute("SELECT pg_notify($1, 'proposal')", CHANNEL)
    return proposal_id


async def _renew(store: Store, proposal_id: int) -> None:
    """Renew until the proposal expires; a short outage of the database does no harm.

    An expired proposal is not reopened, because gateways may have unloaded the policy by then.
    """
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            status = await store.pool.execute(
                "UPDATE babylon.proposals SET open_until = now() + $2::interval"
                " WHERE proposal_id = $1 AND outcome IS NULL AND open_until > now()",
                proposal_id,
                _LASTS,
            )
        except UNREACHABLE as error:
            log.warning("proposal %d could not be renewed, trying again: %r", proposal_id, error)
            continue
        if not affected(status):
            log.error("proposal %d expired: it was not renewed in time", proposal_id)
            return


async def _close(store: Store, proposal_id: int, outcome: str) -> None:
    """Store the outcome. Only log a database error, so that it does not hide the block's error."""
    try:
        await store.pool.execute(
            "UPDATE babylon.proposals SET outcome = $2 WHERE proposal_id = $1", proposal_id, outcome
        )
    except UNREACHABLE as error:
        log.warning(
            "proposal %d will expire, its outcome (%s) is not stored: %r",
            proposal_id,
            outcome,
            error,
        )
    failpoint("proposal.closed")
