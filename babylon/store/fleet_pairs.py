"""The table ``fleet_pairs``: the fleet's P&L in a world, and another policy's in the same one."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime

from babylon.core.types import Claim
from babylon.store.connection import Store, guarded


@dataclass(frozen=True, slots=True)
class FleetPair:
    """A world of a window, in dollars. Two P&Ls in it differ by ``room_usd`` at most."""

    scenario_id: str
    fleet_usd: float  # mean over the agents
    before_usd: float
    room_usd: float


async def paired_worlds(store: Store, window_id: str, champion: int, rival: int) -> frozenset[str]:
    """Return the worlds of a window, or of a recipe over it, of which a pair is stored."""
    rows = await store.pool.fetch(
        "SELECT scenario_id FROM babylon.fleet_pairs WHERE (champion, predecessor) = ($2, $3)"
        " AND split_part(window_id, '+', 1) = split_part($1, '+', 1)",
        window_id,
        champion,
        rival,
    )
    return frozenset(row["scenario_id"] for row in rows)


async def add_pairs(
    store: Store,
    claim: Claim,
    champion: int,
    rival: int,
    pairs: Sequence[FleetPair],
    *,
    since: datetime | None = None,
) -> list[list[FleetPair]]:
    """Store a window's pairs, once. Return all of the two policies by window, the oldest first.

    ``since``: those of windows that were first claimed before are not returned.

    A recipe trains on the play of a window again. A world that is known from the window, or from
    another recipe over it, is no further evidence.
    """
    async with guarded(store, claim) as connection:
        await connection.executemany(
            "INSERT INTO babylon.fleet_pairs (window_id, champion, predecessor, scenario_id,"
            " fleet_usd, before_usd, room_usd)"
            " SELECT $1::text, $2::integer, $3::integer, $4::text, $5::float8, $6::float8,"
            " $7::float8 WHERE NOT EXISTS (SELECT FROM babylon.fleet_pairs"
            "  WHERE (champion, predecessor, scenario_id) = ($2, $3, $4)"
            "  AND split_part(window_id, '+', 1) = split_part($1, '+', 1))"
            " ON CONFLICT DO NOTHING",
            [(claim.window_id, champion, rival, *astuple(pair)) for pair in pairs],
        )
        rows = await connection.fetch(
            "SELECT window_id, scenario_id, fleet_usd, before_usd, room_usd"
            " FROM babylon.fleet_pairs JOIN babylon.windows USING (window_id)"
            " WHERE (champion, predecessor) = ($1, $2)"
            " AND created_at >= coalesce($3, '-infinity'::timestamptz) ORDER BY number",
            champion,
            rival,
            since,
        )
    windows: dict[str, list[FleetPair]] = {}
    for window_id, *pair in rows:
        windows.setdefault(window_id, []).append(FleetPair(*pair))
    return [*windows.values()]
