"""The table ``window_health``: figures of each window's data, and its alarms."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import asyncpg

from babylon.core.failpoints import failpoint
from babylon.core.types import Claim
from babylon.core.windows import Window
from babylon.store.connection import Store, guarded

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAlarm:
    """A figure outside its usual range, and the sentence that says so."""

    figure: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHealth:
    """A row of ``babylon.window_health``. ``minutes``: length of the window."""

    window_id: str
    minutes: int
    figures: Figures
    alarms: tuple[HealthAlarm, ...] = ()


async def store_health(store: Store, claim: Claim, health: WindowHealth) -> None:
    """Store the health of a window, in place of that of an earlier attempt.

    Raises:
        FencedError: the claim is stale.
    """
    failpoint("health.before")
    async with guarded(store, claim) as connection:
        await connection.execute(
            "INSERT INTO babylon.window_health (window_id, minutes, figures, alarms)"
            " VALUES ($1, $2, $3, $4) ON CONFLICT (window_id) DO UPDATE SET"
            " minutes = excluded.minutes, figures = excluded.figures, alarms = excluded.alarms,"
            " measured_at = now()",
            health.window_id,
            health.minutes,
            health.figures,
            [asdict(alarm) for alarm in health.alarms],
        )
    failpoint("health.after")


async def figures_before(store: Store, window: Window, windows: int) -> list[Figures]:
    """Return the figures of the last windows of the same length that start before this one."""
    rows = await store.pool.fetch(
        "SELECT figures FROM babylon.window_health WHERE window_id < $1 AND minutes = $2"
        " ORDER BY window_id DESC LIMIT $3",
        window.id,
        window.minutes,
        windows,
    )
    return [row["figures"] for row in rows]


async def get_health(store: Store, window_id: str) -> WindowHealth | None:
    """Return a window's health, ``None`` if it was never measured."""
    rows = await store.pool.fetch(f"{_SELECT} WHERE window_id = $1", window_id)
    return _health(rows[0]) if rows else None


async def newest_health(store: Store) -> WindowHealth | None:
    """Return the health of the newest window that was measured."""
    rows = await store.pool.fetch(f"{_SELECT} ORDER BY window_id DESC LIMIT 1")
    return _health(rows[0]) if rows else None


async def alarms_since(store: Store, oldest: str = "") -> dict[str, Sequence[HealthAlarm]]:
    """Return the alarms of the windows from the id ``oldest`` on that have any."""
    rows = await store.pool.fetch(f"{_SELECT} WHERE window_id >= $1 AND alarms <> '[]'", oldest)
    return {row["window_id"]: _health(row).alarms for row in rows}


_SELECT = "SELECT window_id, minutes, figures, alarms FROM babylon.window_health"


def _health(row: asyncpg.Record) -> WindowHealth:
    values: dict[str, Any] = {**row}
    alarms = tuple(HealthAlarm(**alarm) for alarm in values.pop("alarms"))
    return WindowHealth(**values, alarms=alarms)
