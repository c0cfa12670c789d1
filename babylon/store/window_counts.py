"""Trajectory counts of each window, over the tables collected, trained, late and rejections."""

from collections import Counter
from dataclasses import dataclass, field

from babylon.store.connection import Store


@dataclass(slots=True, kw_only=True)
class WindowCounts:
    """Counts of a window's last run.

    ``rejected`` is by reason. ``late`` leaves out rows that a recipe admitted.
    """

    collected: int = 0
    trained: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


_OF_EACH = "SELECT window_id, count(*) AS n FROM babylon.{} WHERE window_id >= $1 {} GROUP BY 1"


async def count_windows(store: Store, oldest: str = "") -> dict[str, WindowCounts]:
    """Return the counts of the windows from the id ``oldest`` on that have any."""
    counts: dict[str, WindowCounts] = {}

    async def fill(name: str, condition: str = "") -> None:
        for row in await store.pool.fetch(_OF_EACH.format(name, condition), oldest):
            setattr(counts.setdefault(row["window_id"], WindowCounts()), name, row["n"])

    await fill("collected")
    await fill("trained")
    await fill("late", "AND admitted_to IS NULL")
    for row in await store.pool.fetch(
        "SELECT window_id, reason, count(*) AS n FROM babylon.rejections WHERE window_id >= $1"
        " GROUP BY 1, 2 ORDER BY n DESC, reason",
        oldest,
    ):
        counts.setdefault(row["window_id"], WindowCounts()).rejected[row["reason"]] = row["n"]
    return counts
