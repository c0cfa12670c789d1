"""The tables ``policies`` and ``trained``: committed checkpoints, and the trajectories they used.

Version 0 is the base model. ``commit_policy`` makes a window trained: the policy, its consumed
trajectories and the window's state change in one transaction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import asyncpg
import msgspec

from babylon.core.errors import AlreadyTrainedError, ModelError, SupersededError
from babylon.core.failpoints import failpoint
from babylon.core.types import Claim
from babylon.core.windows import WindowState
from babylon.store.connection import HALTED_S, Connection, Store, guarded
from babylon.store.windows import change_state

Kind = Literal["base", "full", "lora"]
NO_POLICY = "no policy is registered yet: run `babylon model init`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A row of ``babylon.policies``.

    ``uri`` is the directory of the weights, or an id of the Hugging Face hub. It is gone after
    ``removed_at``. The row holds a reference (``Home.reference``) instead. ``digest`` is the hash
    of its files at the commit. ``verdict`` is the result of validation, ``checks`` that of the
    newest checks before deployment (``babylon.deployment.checks.check_policy``).
    """

    policy_version: int
    parent_version: int | None
    kind: Kind
    uri: str
    base_model: str
    window_id: str | None
    batch_id: str | None
    metrics: dict[str, Any]
    verdict: dict[str, Any] | None
    created_at: datetime
    removed_at: datetime | None
    digest: str | None = None
    checks: dict[str, Any] | None = None


async def ensure_base(
    store: Store, *, uri: str, base_model: str, digest: str | None = None
) -> None:
    """Register the base model as policy 0 and route to it, unless policy 0 exists."""
    failpoint("base.before")
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "INSERT INTO babylon.policies (policy_version, kind, uri, base_model, digest)"
            " VALUES (0, 'base', $1, $2, $3) ON CONFLICT DO NOTHING",
            store.home.reference(uri),
            base_model,
            digest,
        )
        await connection.execute(
            "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
            " VALUES (1, 0, 'babylon', 'base model') ON CONFLICT DO NOTHING"
        )
        await connection.execute("NOTIFY babylon_routes, '1'")
    failpoint("base.after")


async def champion(store: Store) -> tuple[Policy, int]:
    """Return the champion and the version of the route in force.

    Raises:
        ModelError: there is no policy yet.
    """
    row = await store.pool.fetchrow(
        "SELECT policies.*, route_version FROM babylon.routes JOIN babylon.policies"
        " USING (policy_version) ORDER BY route_version DESC LIMIT 1"
    )
    if row is None:
        raise ModelError(NO_POLICY)
    fields = dict(row)
    route_version = fields.pop("route_version")
    return _policy(store, fields), route_version


async def get_policy(store: Store, version: int) -> Policy:
    """Return the policy of that version.

    Raises:
        ModelError: it does not exist.
    """
    row = await store.pool.fetchrow(
        "SELECT * FROM babylon.policies WHERE policy_version = $1",
        version if version < 2**31 else None,  # a larger number does not fit the column
    )
    if row is None:
        if not await store.pool.fetchval("SELECT EXISTS (SELECT FROM babylon.policies)"):
            raise ModelError(NO_POLICY)
        raise ModelError(f"there is no policy version {version}: see `babylon model list`")
    return _policy(store, row)


async def list_policies(
    store: Store, newest: int | None = None, before: int | None = None
) -> list[Policy]:
    """Return policies, oldest first. ``newest``: at most so many. ``before``: older than this."""
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.policies WHERE $2::integer IS NULL OR policy_version < $2"
        " ORDER BY policy_version DESC LIMIT $1",
        *(newest, before),
    )
    return [_policy(store, row) for row in rows[::-1]]


async def policies_about(
    store: Store, window_id: str | None, versions: Iterable[int] = ()
) -> dict[int, Policy]:
    """Return the policies that a window trained, released ones too, and those of ``versions``.

    ``window_id``: None for no window.
    """
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.policies WHERE window_id = $1 OR policy_version = ANY($2::bigint[])"
        " ORDER BY policy_version",
        window_id,
        list(versions),
    )
    return {row["policy_version"]: _policy(store, row) for row in rows}


async def checkpoint_uris(store: Store, versions: Iterable[int]) -> dict[int, str]:
    """Return version → URI of the registered versions, though its checkpoint was removed."""
    rows = await store.pool.fetch(
        "SELECT policy_version, uri FROM babylon.policies WHERE policy_version = ANY($1)",
        list(versions),
    )
    return {row["policy_version"]: store.home.resolve(row["uri"]) for row in rows}


async def policy_of_batch(store: Store, batch_id: str) -> Policy | None:
    """Return the policy that a batch was trained into; a worker resumes with it after a crash."""
    row = await store.pool.fetchrow("SELECT * FROM babylon.policies WHERE batch_id = $1", batch_id)
    return None if row is None else _policy(store, row)


def _policy(store: Store, row: asyncpg.Record | dict[str, Any]) -> Policy:
    return Policy(**{**row, "uri": store.home.resolve(row["uri"])})


async def policy_of_window(store: Store, window_id: str) -> Policy | None:
    """Return the window's policy; policies that it released are not meant."""
    row = await store.pool.fetchrow(
        "SELECT p.* FROM babylon.windows w JOIN babylon.policies p USING (batch_id)"
        " WHERE w.window_id = $1",
        window_id,
    )
    return None if row is None else _policy(store, row)


async def next_batch(store: Store, window_id: str) -> str:
    """Return the id of the window's next batch: ``window-2025-11-14T09:00``, then ``...~2``.

    A window is one batch, and has a second one only if it released the policy of the first.
    """
    released = await store.pool.fetchval(
        "SELECT count(*) FROM babylon.policies WHERE window_id = $1", window_id
    )
    return f"window-{window_id}" + (f"~{released + 1}" if released else "")


async def commit_policy(
    store: Store,
    claim: Claim,
    *,
    parent_version: int,
    kind: Kind,
    uri: str,
    base_model: str,
    batch_id: str,
    trajectory_ids: Sequence[str],
    metrics: dict[str, Any],
    digest: str | None = None,
) -> int:
    """Register a checkpoint and consume its trajectories, in one transaction.

    ``digest`` is the hash of the checkpoint's files (``babylon.policies.checkpoint_files``).

    Returns:
        The new policy version.

    The parent must be the champion at the moment of the commit. Otherwise this policy would be the
    sibling of one that serves, and could never be deployed without taking that one back.

    Raises:
        FencedError: the claim is stale.
        AlreadyTrainedError: the window has a policy, or one of the trajectories was trained before.
        SupersededError: the parent is no longer the champion; nothing was changed.
    """
    failpoint("policy.before")
    async with guarded(store, claim) as connection:
        await _check_untrained(connection, claim)
        await lock_routes(connection)
        await require_champion(connection, parent_version)
        # The lock makes version numbers consecutive: two commits must not read the same maximum.
        await connection.execute("LOCK TABLE babylon.policies IN SHARE ROW EXCLUSIVE MODE")
        version: int = await connection.fetchval(
            "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model,"
            " window_id, batch_id, metrics, digest) SELECT max(policy_version) + 1, $1, $2, $3, $4,"
            " $5, $6, $7, $8 FROM babylon.policies RETURNING policy_version",
            parent_version,
            kind,
            store.home.reference(uri),
            base_model,
            claim.window_id,
            batch_id,
            metrics,
            digest,
        )
        await _consume(connection, claim, batch_id, trajectory_ids)
        if store.game_tables_ours:
            await _write_to_game(connection, claim, version, batch_id, list(trajectory_ids))
        await change_state(connection, claim, WindowState.TRAINED)
        await connection.execute(
            "UPDATE babylon.windows SET batch_id = $2, metrics = metrics || $3"
            " WHERE window_id = $1",
            claim.window_id,
            batch_id,
            metrics,
        )
        failpoint("policy.inserted")
    failpoint("policy.after")
    return version


async def lock_routes(connection: Connection, halted_s: float = HALTED_S) -> None:
    """Block new routes, proposals and policies until the transaction ends.

    A process that halts loses the lock after ``halted_s``; otherwise it would block deployments.
    """
    await connection.execute(
        f"SET LOCAL idle_in_transaction_session_timeout = '{halted_s:g}s';"
        " LOCK TABLE babylon.routes IN SHARE ROW EXCLUSIVE MODE"
    )


async def require_champion(connection: Connection, parent_version: int) -> None:
    """Check that a candidate's parent leads. The caller holds the lock on routes.

    Raises:
        SupersededError: another policy is the champion.
    """
    leading = await connection.fetchval(
        "SELECT policy_version FROM babylon.routes ORDER BY route_version DESC LIMIT 1"
    )
    if leading != parent_version:
        raise SupersededError(superseded_by(parent_version, leading))


def superseded_by(parent_version: int, leading: int) -> str:
    return f"its update started from policy {parent_version}, and policy {leading} leads now"


async def set_verdict(
    store: Store, claim: Claim, policy_version: int, verdict: dict[str, Any]
) -> None:
    """Store the verdict of the checkpoint's validation."""
    failpoint("verdict.before")
    async with guarded(store, claim) as connection:
        await connection.execute(
            "UPDATE babylon.policies SET verdict = $2 WHERE policy_version = $1",
            policy_version,
            verdict,
        )
    failpoint("verdict.after")


async def set_checks(store: Store, policy_version: int, checks: dict[str, Any]) -> None:
    """Store the result of a policy's checks before deployment."""
    await store.pool.execute(
        "UPDATE babylon.policies SET checks = $2 WHERE policy_version = $1", policy_version, checks
    )


async def _check_untrained(connection: Connection, claim: Claim) -> None:
    batch_id = await connection.fetchval(
        "SELECT batch_id FROM babylon.windows WHERE window_id = $1", claim.window_id
    )
    if batch_id is not None:
        raise AlreadyTrainedError(
            f"window {claim.window_id} was trained as batch {batch_id}; nothing was changed"
        )


async def _consume(
    connection: Connection, claim: Claim, batch_id: str, trajectory_ids: Sequence[str]
) -> None:
    try:
        await connection.executemany(
            "INSERT INTO babylon.trained (trajectory_id, window_id, batch_id) VALUES ($1, $2, $3)",
            [(trajectory_id, claim.window_id, batch_id) for trajectory_id in trajectory_ids],
        )
    except asyncpg.UniqueViolationError as error:
        raise AlreadyTrainedError(
            f"batch {batch_id} of window {claim.window_id} holds a trajectory that was trained"
            f" before: {error.detail} Nothing was changed"
        ) from error


async def _write_to_game(
    connection: Connection, claim: Claim, version: int, batch_id: str, trajectory_ids: list[str]
) -> None:
    """Copy the batch and the policy into the game's own tables, which must be ours."""
    await connection.execute(
        'UPDATE trajectories SET "usedInTraining" = true, "trainedInBatch" = $2,'
        ' "updatedAt" = now() WHERE "trajectoryId" = ANY($1)',
        trajectory_ids,
        batch_id,
    )
    rows = await connection.fetch(
        "SELECT trajectory_id, score FROM babylon.scores WHERE window_id = $1", claim.window_id
    )
    scores = {row["trajectory_id"]: row["score"] for row in rows}
    rewards = [scores.get(trajectory_id) for trajectory_id in trajectory_ids]
    await connection.execute(
        'INSERT INTO training_batches (id, "batchId", "baseModel", "modelVersion",'
        ' "trajectoryIds", "rewardsJson", "trainingLoss", status, "startedAt", "completedAt")'
        " SELECT $1, $1, base_model, 'v' || policy_version, $3, $4,"
        " (p.metrics->>'training_loss')::float8, 'completed', w.updated_at, now()"
        " FROM babylon.policies p JOIN babylon.windows w USING (window_id)"
        " WHERE policy_version = $2",
        batch_id,
        version,
        msgspec.json.encode(trajectory_ids).decode(),
        msgspec.json.encode(rewards).decode(),
    )
    await connection.execute(
        'INSERT INTO trained_models (id, "modelId", version, "baseModel", "trainingBatch", status,'
        ' "storagePath", "avgReward", "evalMetrics", "updatedAt")'
        " SELECT 'babylon-v' || policy_version, 'babylon-v' || policy_version,"
        " 'v' || policy_version, base_model, $2, 'ready', uri,"
        " (metrics->>'avg_reward')::float8, metrics, now()"
        " FROM babylon.policies WHERE policy_version = $1",
        version,
        batch_id,
    )
