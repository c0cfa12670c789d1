"""The tables ``plays``, ``play_steps`` and ``continuations``: trajectories that come over HTTP.

A trajectory belongs to the key that began it: by its first call, or by a start. Its steps wait in
``play_steps`` until it is finished; then the game's row takes their place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime

import asyncpg

from babylon.core.windows import Window
from babylon.store.connection import Connection, Store, affected
from babylon.store.session import Pool

ROW_BYTES = 2**10  # what a step or a call costs in memory, however small it is
_FORGET_AFTER = "1 day"  # a conversation that rests longer begins a new trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlay:
    """A row of ``babylon.plays``; ``started_at`` and below are None until a start or finish.

    ``next_step``: the number after the newest step's.
    """

    trajectory_id: str
    key_id: str
    agent_id: str | None
    began_at: datetime
    started_at: datetime | None
    scenario_id: str | None
    minutes: int | None
    window_id: str | None
    finished_at: datetime | None
    next_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCall:
    """The part of a recorded call that the game's row repeats. ``messages`` is JSON."""

    call_id: str
    trajectory_id: str | None
    agent_id: str | None
    step_number: int | None
    started_at: datetime
    model: str
    policy_version: int
    messages: str
    response: str
    temperature: float
    top_p: float
    max_tokens: int
    latency_ms: int


PlayClaim = tuple[str, str | None]
"""Key id, agent id."""
Owner = tuple[str, str | None]
"""Key id, and the agent, which is None until the trajectory is started."""


async def claim_plays(
    session: "Connection | Pool", claims: Mapping[str, PlayClaim]
) -> dict[str, Owner]:
    """Give each trajectory to its key if it has no owner; return its owner."""
    listed = sorted((name, *claim) for name, claim in claims.items())  # in one order: no deadlock
    rows = await session.fetch(_CLAIM, *map(list, zip(*listed, strict=True)))
    return {row["trajectory_id"]: (row["key_id"], row["started_by"]) for row in rows}


async def lock_play(connection: Connection, trajectory_id: str) -> StoredPlay | None:
    """Return the trajectory and keep other writers out until the transaction ends."""
    await connection.execute(
        "SELECT FROM babylon.plays WHERE trajectory_id = $1 FOR NO KEY UPDATE", trajectory_id
    )
    return await find_play(connection, trajectory_id)


async def find_play(session: "Connection | Pool", trajectory_id: str) -> StoredPlay | None:
    """Return the trajectory, None if no call named it and nobody started it."""
    row = await session.fetchrow(_FIND, trajectory_id)
    return StoredPlay(**row) if row else None


async def start_play(
    connection: Connection,
    play: StoredPlay,
    agent_id: str,
    scenario_id: str,
    window: Window,
    at: datetime,
) -> StoredPlay:
    """Store what a start tells about a locked trajectory, and return the trajectory."""
    await connection.execute(
        "UPDATE babylon.plays SET agent_id = $2, scenario_id = $3, window_id = $4, minutes = $5,"
        " started_at = $6 WHERE trajectory_id = $1",
        *(play.trajectory_id, agent_id, scenario_id, window.id, window.minutes, at),
    )
    return replace(
        play,
        agent_id=agent_id,
        scenario_id=scenario_id,
        window_id=window.id,
        minutes=window.minutes,
        started_at=at,
    )


async def add_step(
    connection: Connection, trajectory_id: str, number: int, at: datetime, step: str
) -> str | None:
    """Store a step (JSON) of a locked trajectory, or return the one stored under its number."""
    stored: str | None = await connection.fetchval(
        "SELECT step FROM babylon.play_steps WHERE trajectory_id = $1 AND number = $2",
        *(trajectory_id, number),
    )
    if stored is None:
        await connection.execute(
            "INSERT INTO babylon.play_steps VALUES ($1, $2, $3, $4)",
            *(trajectory_id, number, at, step),
        )
    return stored


async def read_steps(connection: Connection, trajectory_id: str) -> list[tuple[datetime, str]]:
    """Return the times and steps (JSON) of an unfinished trajectory in order."""
    return [
        (row["at"], row["step"])
        for row in await connection.fetch(
            "SELECT at, step FROM babylon.play_steps WHERE trajectory_id = $1 ORDER BY number",
            trajectory_id,
        )
    ]


async def stored_bytes(connection: Connection, trajectory_id: str) -> int:
    """Return the size of a trajectory's steps and spans. Each counts ``ROW_BYTES`` more."""
    size: int = await connection.fetchval(_STORED, trajectory_id, ROW_BYTES)
    return size


async def recorded_ids(
    connection: Connection, play: StoredPlay, call_ids: Collection[str]
) -> set[str]:
    """Return those of the ids that are recorded calls of the trajectory's key."""
    rows = await connection.fetch(
        "SELECT call_id FROM babylon.calls WHERE call_id = ANY($1::text[]) AND key_id = $2",
        *(list(call_ids), play.key_id),
    )
    return {row["call_id"] for row in rows}


async def call_bytes(connection: Connection, play: StoredPlay, call_ids: Sequence[str]) -> int:
    """Return the size of the calls that ``played_calls`` would read. Each counts ``ROW_BYTES``
    more."""
    size: int = await connection.fetchval(
        _CALL_BYTES, play.trajectory_id, play.key_id, list(call_ids), ROW_BYTES
    )
    return size


async def played_calls(
    connection: Connection, play: StoredPlay, call_ids: Sequence[str]
) -> list[PlayedCall]:
    """Return the calls of the trajectory's key that have these ids, or name the trajectory and were
    not interrupted."""
    rows = await connection.fetch(_CALLS, play.trajectory_id, play.key_id, list(call_ids))
    return [PlayedCall(**row) for row in rows]


async def adopt_calls(
    connection: Connection, trajectory_id: str, calls: Sequence[PlayedCall]
) -> bool:
    """Give calls that named no trajectory to this one, with the feedback that they had before.

    Returns:
        False if one is no longer where it was read: another trajectory took it meanwhile.
    """
    others = [one for one in calls if one.trajectory_id != trajectory_id]
    ids = [one.call_id for one in others]
    places = {one.trajectory_id for one in others if one.trajectory_id is not None}
    await connection.execute(_ADOPT_FEEDBACK, trajectory_id, ids)
    status = await connection.execute(
        "UPDATE babylon.calls SET trajectory_id = $1 WHERE call_id = ANY($2::text[])"
        " AND (trajectory_id IS NULL OR trajectory_id = ANY($3::text[]))",
        *(trajectory_id, ids, [*places]),
    )
    return affected(status) == len(others)


async def call_place(store: Store, call_id: str, key_id: str) -> str | None:
    """Return the trajectory id of a recorded call of the key; '' if it has none, None: unknown."""
    place: str | None = await store.pool.fetchval(
        "SELECT coalesce(trajectory_id, '') FROM babylon.calls WHERE call_id = $1 AND key_id = $2",
        *(call_id, key_id),
    )
    return place


async def calling_agent(connection: Connection, play: StoredPlay) -> str | None:
    """Return an agent that a recorded call of the trajectory names; '' if none does, None without
    such a call."""
    agent_id: str | None = await connection.fetchval(
        "SELECT coalesce(agent_id, '') FROM babylon.calls"
        " WHERE trajectory_id = $1 AND key_id = $2 ORDER BY agent_id NULLS LAST LIMIT 1",
        *(play.trajectory_id, play.key_id),
    )
    return agent_id


async def close_play(connection: Connection, trajectory_id: str, steps: int) -> None:
    """Note that the game's row is written; the steps in it are no longer kept here."""
    await connection.execute(
        "DELETE FROM babylon.play_steps WHERE trajectory_id = $1", trajectory_id
    )
    await connection.execute(
        "UPDATE babylon.plays SET finished_at = clock_timestamp(), steps = $2"
        " WHERE trajectory_id = $1",
        *(trajectory_id, steps),
    )


async def remove_plays(store: Store, before: datetime, kept: Collection[Window]) -> None:
    """Remove trajectories that began ``before``, except those in the time of ``kept`` windows."""
    times = [asyncpg.Range(one.start, one.end) for one in kept]
    while await store.pool.execute(_REMOVE, before, times, _PORTION) == f"DELETE {_PORTION}":
        pass


async def note_continuations(store: Store, found: Mapping[bytes, str | None]) -> None:
    """Store digest → trajectory id. A digest of two trajectories names none of them (None)."""
    await store.pool.executemany(_NOTE, sorted(found.items()))  # in one order: no deadlock
    await store.pool.execute(
        f"DELETE FROM babylon.continuations WHERE noted_at < now() - interval '{_FORGET_AFTER}'"
    )


async def find_continued(store: Store, digests: Sequence[bytes]) -> dict[bytes, str | None]:
    """Return the trajectory id of each known digest, None for a digest of two trajectories."""
    rows = await store.pool.fetch(
        "SELECT digest, trajectory_id FROM babylon.continuations WHERE digest = ANY($1::bytea[])",
        list(digests),
    )
    return {row["digest"]: row["trajectory_id"] for row in rows}


_FIND = """
SELECT p.trajectory_id, p.key_id, p.agent_id, p.began_at, p.started_at, p.scenario_id, p.minutes,
       p.window_id, p.finished_at,
       coalesce(p.steps, (SELECT max(s.number)::bigint + 1 FROM babylon.play_steps s
                          WHERE s.trajectory_id = p.trajectory_id), 0) AS next_step
FROM babylon.plays p WHERE p.trajectory_id = $1
"""

_CLAIM = """
INSERT INTO babylon.plays AS known (trajectory_id, key_id, agent_id)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[])
ON CONFLICT (trajectory_id) DO UPDATE SET key_id = known.key_id
RETURNING trajectory_id, key_id, CASE WHEN started_at IS NOT NULL THEN agent_id END AS started_by
"""

# Postgres knows the length of a long text without reading it.
_STORED = """
SELECT coalesce(sum(size), 0)::bigint FROM (
    SELECT octet_length(step) + $2::integer AS size FROM babylon.play_steps
    WHERE trajectory_id = $1
    UNION ALL
    SELECT octet_length(span) + $2::integer FROM babylon.play_spans
    WHERE trajectory_id = $1 AND span IS NOT NULL
) AS stored
"""

# A client repeats a call after its timeout. The interrupted one is no part of the play, unless a
# step says so.
_OF_PLAY = """
(call_id = ANY($3::text[]) OR (trajectory_id = $1 AND finish_reason <> 'interrupted'))
AND key_id = $2
"""
_CALL_BYTES = f"""
SELECT coalesce(sum(octet_length(messages) + octet_length(response) + $4::integer), 0)::bigint
FROM babylon.calls WHERE {_OF_PLAY}
"""
_CALLS = f"""
SELECT {", ".join(field.name for field in fields(PlayedCall))} FROM babylon.calls
WHERE {_OF_PLAY} ORDER BY started_at, call_id
"""

# Only what was said of a call where it was: any key may name the call in feedback of its own.
_ADOPT_FEEDBACK = """
UPDATE babylon.feedback f SET trajectory_id = $1 FROM babylon.calls c
WHERE c.call_id = ANY($2::text[]) AND c.trajectory_id <> $1
  AND (f.trajectory_id, f.call_id) = (c.trajectory_id, c.call_id)
"""

_PORTION = 5000  # plays that a statement removes: millions take longer than a query may
_REMOVE = """
DELETE FROM babylon.plays WHERE trajectory_id IN (
    SELECT trajectory_id FROM babylon.plays p
    WHERE began_at < $1 AND NOT $2::tstzmultirange @> coalesce(p.started_at, p.began_at)
    LIMIT $3
)
"""

_NOTE = """
INSERT INTO babylon.continuations AS known (digest, trajectory_id) VALUES ($1, $2)
ON CONFLICT (digest) DO UPDATE SET trajectory_id =
    CASE WHEN known.trajectory_id = excluded.trajectory_id THEN known.trajectory_id END
"""
