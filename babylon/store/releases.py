"""The tables ``releases`` and ``released``: policies whose play another update may train.

A window gives the play of its policy back by itself when another policy took the lead
(``supersede``). An operator does it for a window that was rejected or rolled back
(``release_window``). Either way the policy can never serve, or its play would count twice.
"""

from babylon.core.errors import WindowError
from babylon.core.types import Claim
from babylon.core.windows import DONE, WindowState
from babylon.store.approvals import void_question
from babylon.store.attempts import end_attempt
from babylon.store.connection import Connection, Store, guarded
from babylon.store.policies import lock_routes

_RELEASABLE = ("in a rejected candidate", "in a policy rolled back")


async def supersede(store: Store, claim: Claim, reason: str) -> None:
    """End the claim of a window whose parent no longer leads. The window is ``scored`` again.

    A committed policy of the window is released with its trajectories, except if it serves.

    Raises:
        FencedError: the claim is stale.
        WindowError: the window is neither scored nor trained, or its policy serves.
    """
    async with guarded(store, claim) as connection:
        await lock_routes(connection)
        row = await connection.fetchrow(_OF_WINDOW, claim.window_id)
        assert row is not None  # it is claimed
        if row["state"] == WindowState.TRAINED:
            if row["fate"] != "in a candidate":
                raise WindowError(
                    f"window {claim.window_id}: policy {row['policy_version']} is {row['fate']}, so"
                    " its play is not trained again"
                )
            await _release(store, connection, row["policy_version"], claim.owner, reason)
        elif row["state"] != WindowState.SCORED:
            raise WindowError(f"window {claim.window_id} is {row['state']}: it was not trained")
        await connection.execute(
            "UPDATE babylon.windows SET state = 'scored', batch_id = NULL, lease_until = NULL,"
            " reason = $2, attempts = greatest(attempts - 1, 0), retry_at = NULL,"
            " updated_at = now() WHERE window_id = $1",
            claim.window_id,
            reason,
        )
        await end_attempt(connection, claim, "superseded", reason)


async def release_window(store: Store, window_id: str, author: str, reason: str) -> int:
    """Release the trajectories of a window that was rejected or rolled back.

    Returns:
        The number of trajectories that can be trained again, by a recipe.

    Raises:
        WindowError: the window is not done, or its policy serves, may serve, or was released.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "SELECT FROM babylon.windows WHERE window_id = $1 FOR NO KEY UPDATE", window_id
        )
        await lock_routes(connection)
        row = await connection.fetchrow(_OF_WINDOW, window_id)
        if row is None or row["state"] not in DONE:
            raise WindowError(
                f"window {window_id} is {row['state'] if row else 'not trained'}: only the play of"
                " a window that is done can be released (`babylon windows show`)"
            )
        if row["fate"] not in _RELEASABLE:
            raise WindowError(
                f"the play of window {window_id} is {row['fate']} (policy {row['policy_version']}):"
                " only that of a rejected or rolled-back policy can be released; `babylon model"
                " rollback` takes a policy back"
            )
        return await _release(store, connection, row["policy_version"], author, reason)


_OF_WINDOW = """
SELECT w.state, f.policy_version, f.fate
FROM babylon.windows w LEFT JOIN babylon.policy_fates f USING (batch_id)
WHERE w.window_id = $1
"""


async def _release(
    store: Store, connection: Connection, version: int, author: str, reason: str
) -> int:
    await connection.execute(
        "INSERT INTO babylon.releases (policy_version, author, reason) VALUES ($1, $2, $3)",
        version,
        author,
        reason,
    )
    await void_question(connection, version, reason)
    moved = await connection.fetch(
        "WITH freed AS (DELETE FROM babylon.trained t USING babylon.policies p"
        " WHERE p.policy_version = $1 AND t.batch_id = p.batch_id"
        " RETURNING t.trajectory_id, t.window_id)"
        " INSERT INTO babylon.released (trajectory_id, policy_version, window_id)"
        " SELECT trajectory_id, $1, window_id FROM freed RETURNING trajectory_id",
        version,
    )
    if store.game_tables_ours:
        await _write_to_game(connection, version, reason)
    return len(moved)


async def _write_to_game(connection: Connection, version: int, reason: str) -> None:
    """Undo the marks of training in the game's own tables, which must be ours."""
    batch_id = await connection.fetchval(
        "SELECT batch_id FROM babylon.policies WHERE policy_version = $1", version
    )
    await connection.execute(
        'UPDATE trajectories SET "usedInTraining" = false, "trainedInBatch" = NULL,'
        ' "updatedAt" = now() WHERE "trainedInBatch" = $1',
        batch_id,
    )
    await connection.execute(
        "UPDATE training_batches SET status = 'failed', error = $2 WHERE \"batchId\" = $1",
        batch_id,
        reason,
    )
    await connection.execute(
        "UPDATE trained_models SET status = 'archived', \"archivedAt\" = now(),"
        ' "updatedAt" = now() WHERE "modelId" = $1',
        f"babylon-v{version}",
    )
