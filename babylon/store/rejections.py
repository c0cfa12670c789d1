"""The table ``rejections``, trajectories that validation refused, and the counts of each window."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from babylon.core.failpoints import failpoint
from babylon.core.types import Claim, Rejection
from babylon.store.connection import Connection, Store, guarded

SAMPLES = 3  # shown for each reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedFor:
    """One reason: how many trajectories it refused, and the first few of them by id."""

    reason: str
    count: int
    samples: tuple[Rejection, ...]


class RejectionTally:
    """Counts rejections by reason and keeps the first samples of each by id."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, list[Rejection]] = {}

    def add(self, rejection: Rejection) -> None:
        reason = str(rejection.reason)
        self._counts[reason] += 1
        samples = [*self._samples.get(reason, []), rejection]
        self._samples[reason] = sorted(samples, key=lambda one: one.trajectory_id)[:SAMPLES]

    def reasons(self) -> list[RejectedFor]:
        """Return the reasons, the most frequent first."""
        return [
            RejectedFor(reason=reason, count=count, samples=tuple(self._samples[reason]))
            for reason, count in sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        ]


async def replace_rejections(store: Store, claim: Claim, rows: Iterable[Rejection]) -> None:
    """Replace the window's rejections, which an earlier attempt may have stored."""
    failpoint("rejections.before")
    async with guarded(store, claim) as connection:
        await connection.execute(
            "DELETE FROM babylon.rejections WHERE window_id = $1", claim.window_id
        )
        await insert_rejections(connection, claim, rows)
    failpoint("rejections.after")


async def insert_rejections(
    connection: Connection, claim: Claim, rows: Iterable[Rejection]
) -> None:
    """Store rejections of the window, none of which is stored yet."""
    await connection.executemany(
        "INSERT INTO babylon.rejections (window_id, trajectory_id, reason, detail)"
        " VALUES ($1, $2, $3, $4)",
        [(claim.window_id, row.trajectory_id, row.reason, row.detail) for row in rows],
    )


async def window_rejections(store: Store, window_id: str) -> list[RejectedFor]:
    """Return the reasons of the window's last validation, the most frequent first."""
    rows = await store.pool.fetch(_BY_REASON, window_id, SAMPLES)
    samples: dict[str, list[Rejection]] = {}
    counts: dict[str, int] = {}
    for trajectory_id, reason, detail, count in rows:
        rejection = Rejection(trajectory_id=trajectory_id, reason=reason, detail=detail)
        samples.setdefault(reason, []).append(rejection)
        counts[reason] = count
    return [
        RejectedFor(reason=reason, count=counts[reason], samples=tuple(own))
        for reason, own in samples.items()
    ]


async def policies_of_rejected(
    store: Store, window_id: str, reasons: Sequence[str]
) -> dict[str, list[int]]:
    """Return trajectory → the policies that answered it, of those refused for these reasons."""
    rows = await store.pool.fetch(
        "SELECT trajectory_id, array_agg(DISTINCT policy_version) AS policies"
        " FROM babylon.rejections JOIN babylon.calls USING (trajectory_id)"
        " WHERE window_id = $1 AND reason = ANY($2) GROUP BY 1",
        window_id,
        [*reasons],
    )
    return {row["trajectory_id"]: row["policies"] for row in rows}


async def policies_of_collected(
    store: Store, window_id: str, reasons: Sequence[str]
) -> dict[str, list[int]]:
    """Return trajectory → the policies that answered it, of all that the window collected.

    Of those that were rejected, only the ones refused for ``reasons``.
    """
    rows = await store.pool.fetch(
        "SELECT trajectory_id, array_agg(DISTINCT policy_version) AS policies"
        " FROM babylon.collected JOIN babylon.calls USING (trajectory_id)"
        " LEFT JOIN babylon.rejections USING (window_id, trajectory_id)"
        " WHERE window_id = $1 AND (reason IS NULL OR reason = ANY($2)) GROUP BY 1",
        window_id,
        [*reasons],
    )
    return {row["trajectory_id"]: row["policies"] for row in rows}


_BY_REASON = """
SELECT trajectory_id, reason, detail, count FROM (
    SELECT trajectory_id, reason, detail,
        count(*) OVER (PARTITION BY reason) AS count,
        row_number() OVER (PARTITION BY reason ORDER BY trajectory_id COLLATE "C") AS place
    FROM babylon.rejections WHERE window_id = $1
) AS rejection
WHERE place <= $2
ORDER BY count DESC, reason COLLATE "C", place
"""


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
