"""The table ``approvals``: may a policy that passed the gate be deployed. A person answers once.

The row outlives the run that asked: after a crash the next run finds the question, or its answer.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

from babylon.core.errors import ApprovalError
from babylon.core.types import Claim
from babylon.store.connection import Connection, Store, guarded

SUPERSEDED = "babylon itself"  # answers a question that is void; no account has such a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A row of ``babylon.approvals``; ``approved`` is ``None`` while nobody answered.

    ``expired``: nobody answered until ``open_until``, by the database's clock.
    """

    policy_version: int
    window_id: str
    asked_at: datetime
    open_until: datetime
    approved: bool | None
    author: str | None
    reason: str | None
    answered_at: datetime | None
    expired: bool

    def __str__(self) -> str:
        if self.approved is None:
            return f"nobody approved it until {self.open_until:%Y-%m-%d %H:%M} UTC"
        word = "approved" if self.approved else "refused"
        return f"{word} by {self.author}" + (f": {self.reason}" if self.reason else "")


async def ask_approval(
    store: Store, claim: Claim, policy_version: int, within: timedelta
) -> Approval:
    """Ask, unless an earlier run of the window did. The time runs from the first question.

    Raises:
        FencedError: the claim is stale.
    """
    async with guarded(store, claim) as connection:
        await connection.execute(
            "INSERT INTO babylon.approvals (policy_version, window_id, open_until)"
            " VALUES ($1, $2, now() + $3::interval) ON CONFLICT DO NOTHING",
            policy_version,
            claim.window_id,
            within,
        )
    return await get_approval(store, policy_version)


async def get_approval(store: Store, policy_version: int) -> Approval:
    """Return the question about a policy, and its answer.

    Raises:
        ApprovalError: nobody asked.
    """
    row = await store.pool.fetchrow(f"{_SELECT} WHERE policy_version = $1", policy_version)
    if row is None:
        raise ApprovalError(
            f"no run asked for an approval of policy {policy_version}: `babylon deploy status`"
            " shows those that wait"
        )
    return _approval(row)


async def open_approvals(store: Store) -> list[Approval]:
    """Return the questions that wait for an answer, oldest first."""
    rows = await store.pool.fetch(
        f"{_SELECT} WHERE approved IS NULL AND open_until > now() ORDER BY policy_version"
    )
    return [_approval(row) for row in rows]


async def answer_approval(
    store: Store, policy_version: int, approved: bool, author: str, reason: str
) -> Approval:
    """Answer the question about a policy.

    Raises:
        ApprovalError: nobody asked, the time is over, or somebody answered before.
    """
    answered = await store.pool.fetchval(
        "UPDATE babylon.approvals SET approved = $2, author = $3, reason = nullif($4, ''),"
        " answered_at = now() WHERE policy_version = $1 AND approved IS NULL AND open_until > now()"
        " RETURNING true",
        policy_version,
        approved,
        author,
        reason,
    )
    found = await get_approval(store, policy_version)
    if not answered:
        remedy = f". `babylon deploy replace {policy_version}` deploys it all the same"
        void = found.approved or found.author == SUPERSEDED  # its play may be trained again
        raise ApprovalError(f"policy {policy_version}: {found}{'' if void else remedy}")
    return found


async def void_question(connection: Connection, policy_version: int, reason: str) -> None:
    """Answer an open question with no, because the policy can never be deployed any more."""
    await connection.execute(
        "UPDATE babylon.approvals SET approved = false, author = $2, reason = $3,"
        " answered_at = now() WHERE policy_version = $1 AND approved IS NULL"
        " AND open_until > now()",
        policy_version,
        SUPERSEDED,
        reason,
    )


_SELECT = "SELECT *, approved IS NULL AND open_until <= now() AS expired FROM babylon.approvals"


def _approval(row: asyncpg.Record) -> Approval:
    return Approval(**row)
