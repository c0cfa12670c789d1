"""The newest windows of the fleet, one row each, and what happened in the last hours."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from babylon.store import Store
from babylon.store.attempts import Attempt, attempts_since
from babylon.store.judgments import usd_by_window
from babylon.store.routes import Route, list_routes
from babylon.store.windows import WindowRow, newest_windows

WINDOWS = 48
ROUTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWindow:
    """A window of the fleet, and the judge's cost of it in US dollars."""

    row: WindowRow
    usd: float

    @property
    def staleness(self) -> float | None:
        """Mean number of updates between the policies that played and the one that was trained."""
        calls = {n: self.row.metrics.get(f"staleness_{n}") for n in range(3)}
        known = {n: count for n, count in calls.items() if isinstance(count, int | float)}
        total = sum(known.values())
        return sum(n * count for n, count in known.items()) / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """The events since a moment: attempts, routes (newest first) and the judge's cost in USD."""

    since: datetime
    attempts: Sequence[Attempt]
    routes: Sequence[Route]
    usd: float


async def read_fleet(store: Store) -> list[FleetWindow]:
    """Return the newest windows, the oldest of them first."""
    rows = await newest_windows(store, WINDOWS)
    cost = await usd_by_window(store, windows=[row.window_id for row in rows])
    return [FleetWindow(row=row, usd=cost.get(row.window_id, 0.0)) for row in reversed(rows)]


async def read_night(store: Store, since: datetime) -> Night:
    """Return what happened since a moment."""
    routes = await list_routes(store, limit=ROUTES)
    return Night(
        since=since,
        attempts=await attempts_since(store, since),
        routes=[route for route in routes if route.created_at >= since],
        usd=sum((await usd_by_window(store, since=since)).values()),
    )
