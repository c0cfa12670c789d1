"""An operator's word on one window: try it again, or leave it alone."""

from babylon.core.errors import WindowError
from babylon.core.windows import DONE, MAX_ATTEMPTS, Window, WindowState, parse_window_id
from babylon.store.connection import Connection, Store, clock_of
from babylon.store.windows import get_window


async def named_window(store: Store, window_id: str, minutes: int) -> Window:
    """Return the window of an id: of its own length, or of ``minutes`` if nobody ever claimed it.

    Raises:
        WindowError: no window of that length has this id.
    """
    row = await get_window(store, window_id)
    return parse_window_id(window_id, row.minutes if row else minutes)


async def retry_window(store: Store, window: Window, author: str) -> None:
    """Let the next run try a window that rests, failed or was skipped.

    Raises:
        WindowError: nobody ever tried it, a run holds it, or it is done.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        state = await _locked(connection, window)
        if state is None:
            raise WindowError(
                f"nobody ever tried window {window.key}: `babylon windows check` says what it lacks"
            )
        begins_anew = state in (WindowState.SKIPPED, WindowState.FAILED)
        await connection.execute(
            "UPDATE babylon.windows SET attempts = 0, retry_at = NULL, updated_at = now(),"
            " state = CASE WHEN $2 THEN 'ready' ELSE state END, reason = $3 WHERE window_id = $1",
            window.key,
            begins_anew,
            f"to be tried again, by {author}",
        )


async def skip_window(store: Store, window: Window, author: str, reason: str) -> None:
    """Leave a window alone: no run chooses it by itself, whatever is played in it.

    Raises:
        WindowError: a run holds it, it is done, its policy is committed, it begins in the future,
            or it is a recipe that nobody tried.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        if window.start > (await clock_of(connection)).now:
            raise WindowError(f"window {window.key} begins in the future: nothing can skip it yet")
        if not window.recipe:
            await connection.execute(
                "INSERT INTO babylon.windows (window_id, minutes) VALUES ($1, $2)"
                " ON CONFLICT DO NOTHING",
                window.key,
                window.minutes,
            )
        state = await _locked(connection, window)
        if state is None:
            raise WindowError(
                f"nobody ever tried window {window.key}, and no run chooses a recipe by itself"
            )
        if state == WindowState.TRAINED:
            raise WindowError(
                f"window {window.key} is trained and its play is used: `babylon train --window"
                f" {window.key}` finishes it"
            )
        # The claim of a worker that died has no end yet.
        await connection.execute(
            "UPDATE babylon.attempts SET ended_at = now(), ended_in = 'skipped',"
            " ending = 'skipped', reason = $2 WHERE window_id = $1 AND ended_at IS NULL",
            window.key,
            f"skipped by {author}: {reason}",
        )
        # The epoch refuses a worker that slept through its lease.
        await connection.execute(
            "UPDATE babylon.windows SET state = 'skipped', attempts = $2, retry_at = NULL,"
            " epoch = epoch + 1, lease_until = NULL, reason = $3, updated_at = now()"
            " WHERE window_id = $1",
            window.key,
            MAX_ATTEMPTS,
            f"skipped by {author}: {reason}",
        )


async def _locked(connection: Connection, window: Window) -> WindowState | None:
    row = await connection.fetchrow(
        "SELECT state, owner, coalesce(lease_until > now(), false) AS leased FROM babylon.windows"
        " WHERE window_id = $1 FOR NO KEY UPDATE",
        window.key,
    )
    if row is None:
        return None
    if row["leased"]:
        raise WindowError(
            f"window {window.key} is leased by {row['owner']}: wait, or stop that run"
        )
    if row["state"] in DONE:
        raise WindowError(
            f"window {window.key} is {row['state']}: what it never trained, `babylon train --window"
            f" {window.id} --recipe NAME` trains"
        )
    return WindowState(row["state"])
