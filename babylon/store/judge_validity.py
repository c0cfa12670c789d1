"""The table ``judge_validity``: a judge's opinions of each window beside the outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from babylon.store.connection import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeIdentity:
    """A judge's model, its method and its rubric. Another of them is another judge."""

    judge: str
    method: str
    rubric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowValidity:
    """A row of ``babylon.judge_validity``. ``log_e`` is the window's evidence, by stake.

    ``groups`` and ``canaries`` are written as JSON, and read as such.
    """

    window_id: str
    by: JudgeIdentity
    groups: Sequence[Any]
    canaries: Sequence[Any] = ()
    log_e: Sequence[float] = ()


async def store_validity(store: Store, row: WindowValidity) -> None:
    """Store a window's opinions, in place of those of an earlier run."""
    await store.pool.execute(
        "INSERT INTO babylon.judge_validity"
        " (window_id, judge, method, rubric, groups, canaries, log_e)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (window_id, judge, method, rubric)"
        " DO UPDATE SET groups = excluded.groups, canaries = excluded.canaries,"
        " log_e = excluded.log_e, judged_at = now()",
        row.window_id,
        row.by.judge,
        row.by.method,
        row.by.rubric,
        msgspec.to_builtins(list(row.groups)),
        msgspec.to_builtins(list(row.canaries)),
        list(row.log_e),
    )


async def judged_before(
    store: Store, by: JudgeIdentity, windows: int, *, without: str = ""
) -> list[WindowValidity]:
    """Return a judge's newest windows, newest first, ``without`` one of them.

    Windows of recipes and of judging again have ids with ``+``. They hold play that counts already.
    """
    rows = await store.pool.fetch(
        "SELECT window_id, groups, canaries, log_e FROM babylon.judge_validity"
        " WHERE judge = $1 AND method = $2 AND rubric = $3"
        " AND window_id <> split_part($4, '+', 1) AND position('+' IN window_id) = 0"
        " ORDER BY window_id DESC LIMIT $5",
        by.judge,
        by.method,
        by.rubric,
        without,
        windows,
    )
    return [WindowValidity(by=by, **row) for row in rows]


async def evidence_before(
    store: Store, by: JudgeIdentity, *, without: str = ""
) -> list[WindowValidity]:
    """Return evidence and canaries of all of a judge's windows, oldest first, ``without`` one.

    Rows of earlier versions have no ``log_e``, but ``groups`` to compute it from.
    """
    rows = await store.pool.fetch(
        "SELECT window_id, canaries, log_e,"
        " CASE WHEN log_e = '{}' THEN groups ELSE '[]' END AS groups"
        " FROM babylon.judge_validity WHERE judge = $1 AND method = $2 AND rubric = $3"
        " AND window_id <> split_part($4, '+', 1) AND position('+' IN window_id) = 0"
        " ORDER BY window_id",
        by.judge,
        by.method,
        by.rubric,
        without,
    )
    return [WindowValidity(by=by, **row) for row in rows]


async def known_judges(store: Store) -> list[JudgeIdentity]:
    """Return the judges that judged any window, the latest first."""
    rows = await store.pool.fetch(
        "SELECT judge, method, rubric FROM babylon.judge_validity GROUP BY 1, 2, 3"
        " ORDER BY max(judged_at) DESC"
    )
    return [JudgeIdentity(**row) for row in rows]


async def judges_of(store: Store, window_id: str) -> list[WindowValidity]:
    """Return the rows of one window, the first judgment first."""
    rows = await store.pool.fetch(
        "SELECT judge, method, rubric, groups, canaries, log_e FROM babylon.judge_validity"
        " WHERE window_id = $1 ORDER BY judged_at",
        window_id,
    )
    return [
        WindowValidity(
            window_id=window_id,
            by=JudgeIdentity(judge=row["judge"], method=row["method"], rubric=row["rubric"]),
            groups=row["groups"],
            canaries=row["canaries"],
            log_e=row["log_e"],
        )
        for row in rows
    ]


async def judged_windows(store: Store, most: int) -> list[str]:
    """Return the ids of the newest judged windows, newest first."""
    rows = await store.pool.fetch(
        "SELECT DISTINCT window_id FROM babylon.judge_validity"
        " WHERE position('+' IN window_id) = 0 ORDER BY window_id DESC LIMIT $1",
        most,
    )
    return [row["window_id"] for row in rows]
