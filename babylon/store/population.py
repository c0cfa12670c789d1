"""The tables ``population`` and ``siblings``: generations of settings, and what windows made of
each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from babylon.core.types import Claim
from babylon.store.connection import Store, guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """A member of a generation. ``genes``: name → value."""

    generation: int
    member: int
    parent: int | None
    origin: str
    genes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """A member's update on one window.

    ``fitness`` is its P&L less its parent's in the same worlds, in dollars; None before it has
    played, if the gate would refuse its replies, or if its update failed. ``uri`` is empty then.
    ``worlds`` is 0 before it has played.
    """

    window_id: str
    batch_id: str
    generation: int
    member: int
    parent_version: int
    uri: str
    fitness: float | None
    fitness_error: float | None
    worlds: int
    metrics: dict[str, Any]
    trajectory_ids: tuple[str, ...]
    chosen: bool
    scored: str | None = None  # digest of the scored window that it was trained on


_COLUMNS = (
    "window_id, batch_id, generation, member, parent_version, uri, fitness, fitness_error, worlds,"
    " metrics, trajectory_ids, chosen, scored"
)


async def add_generation(store: Store, members: Sequence[MemberRow]) -> None:
    """Store a generation, unless another worker has stored it."""
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE babylon.population IN SHARE ROW EXCLUSIVE MODE")
        known = await connection.fetchval(
            "SELECT EXISTS (SELECT FROM babylon.population WHERE generation = $1)",
            members[0].generation,
        )
        if not known:
            await connection.executemany(
                "INSERT INTO babylon.population (generation, member, parent, origin, genes)"
                " VALUES ($1, $2, $3, $4, $5)",
                [(m.generation, m.member, m.parent, m.origin, m.genes) for m in members],
            )


async def list_members(store: Store) -> list[MemberRow]:
    """Return the members of all generations, oldest first."""
    rows = await store.pool.fetch(
        "SELECT generation, member, parent, origin, genes FROM babylon.population"
        " ORDER BY generation, member"
    )
    return [MemberRow(**row) for row in rows]


async def list_siblings(
    store: Store, *, generation: int | None = None, batch_id: str | None = None
) -> list[Sibling]:
    """Return the updates of a generation or of a batch, or all, oldest first.

    Only those of a batch have their trajectories: of all, these are gigabytes in a year.
    """
    ids = "CASE WHEN $2::text IS NULL THEN '{}' ELSE trajectory_ids END AS trajectory_ids"
    rows = await store.pool.fetch(
        f"SELECT {_COLUMNS.replace('trajectory_ids', ids)} FROM babylon.siblings"
        " WHERE ($1::int IS NULL OR generation = $1)"
        " AND ($2::text IS NULL OR batch_id = $2) ORDER BY window_id, batch_id, member",
        generation,
        batch_id,
    )
    found = []
    for row in rows:
        fields = dict(row)
        fields["trajectory_ids"] = tuple(fields["trajectory_ids"])
        fields["uri"] = store.home.resolve(fields["uri"]) if fields["uri"] else ""
        found.append(Sibling(**fields))
    return found


def fitness_by_member(siblings: Sequence[Sibling]) -> dict[str, float]:
    """Return the measured fitness of a window's siblings by name, the fittest first."""
    known = [(one.fitness, one) for one in siblings if one.fitness is not None]
    known.sort(key=lambda pair: pair[0], reverse=True)
    names = [f"member {one.member} of generation {one.generation}" for _, one in known]
    return {
        f"{name}, chosen" if one.chosen else name: gain
        for name, (gain, one) in zip(names, known, strict=True)
    }


async def put_sibling(store: Store, claim: Claim, sibling: Sibling) -> None:
    """Store a sibling, or replace what is known of it.

    Raises:
        FencedError: the claim is stale.
    """
    async with guarded(store, claim) as connection:
        if sibling.chosen:  # an earlier choice, from another parent or of another size
            await connection.execute(
                "UPDATE babylon.siblings SET chosen = false WHERE batch_id = $1", sibling.batch_id
            )
        await connection.execute(
            f"INSERT INTO babylon.siblings ({_COLUMNS})"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
            " ON CONFLICT (batch_id, member) DO UPDATE SET uri = $6, fitness = $7,"
            " fitness_error = $8, worlds = $9, metrics = $10, trajectory_ids = $11, chosen = $12,"
            " generation = $3, parent_version = $5, scored = $13",
            sibling.window_id,
            sibling.batch_id,
            sibling.generation,
            sibling.member,
            sibling.parent_version,
            store.home.reference(sibling.uri) if sibling.uri else "",
            sibling.fitness,
            sibling.fitness_error,
            sibling.worlds,
            sibling.metrics,
            list(sibling.trajectory_ids),
            *(sibling.chosen, sibling.scored),
        )
