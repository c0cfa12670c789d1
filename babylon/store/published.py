"""The tables ``published`` and ``withheld``: what is in the dataset's repository, what must not be.

``published`` is the ledger, with one row a repository, table and window. A row is written before
the commit that holds its file, and gets its revision after it. ``withheld`` lists agents and
trajectories that were taken down: every later file leaves them out.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, fields

from babylon.store.connection import Store, unlimited

_KEY = 0x7075_626C_6973  # "publis"
_FILES_KEY = 0x7772_6974_6573  # "writes"
_LONGEST_S = 3600.0  # an upload may take that long


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file in the repository. ``agents`` and ``trajectory_ids``: those that it tells of."""

    repository: str
    config: str
    window_id: str
    path: str
    sha256: str
    bytes: int
    rows: int
    agents: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """Names of agents and ids of trajectories that were taken down."""

    agents: frozenset[str] = frozenset()
    trajectories: frozenset[str] = frozenset()

    def covers(self, agent_id: str, trajectory_id: str) -> bool:
        return agent_id in self.agents or trajectory_id in self.trajectories


_COLUMNS = [field.name for field in fields(PublishedFile)]


async def list_published(
    store: Store, repository: str, *, for_take_down: bool = False
) -> list[PublishedFile]:
    """Return the ledger of a repository by window and table.

    ``for_take_down``: with ``trajectory_ids``, which are a gigabyte after a year of large fleets,
    and with files of a commit of which nobody knows whether it was made.
    """
    columns = ", ".join(_COLUMNS)
    if not for_take_down:
        columns = columns.replace("trajectory_ids", "'{}'::text[] AS trajectory_ids")
    rows = await store.pool.fetch(
        f"SELECT {columns} FROM babylon.published WHERE repository = $1"
        " AND (revision <> '' OR $2) ORDER BY window_id, config",
        repository,
        for_take_down,
    )
    return [
        PublishedFile(
            **{**row, "agents": tuple(row["agents"]), "trajectory_ids": (*row["trajectory_ids"],)}
        )
        for row in rows
    ]


async def other_repositories(
    store: Store, repository: str, agents: Sequence[str], trajectory_ids: Sequence[str]
) -> list[str]:
    """Return the repositories, apart from this one, whose files tell of any of these names."""
    rows = await store.pool.fetch(
        "SELECT DISTINCT repository FROM babylon.published WHERE repository <> $1"
        " AND (agents && $2::text[] OR trajectory_ids && $3::text[]) ORDER BY 1",
        repository,
        list(agents),
        list(trajectory_ids),
    )
    return [row["repository"] for row in rows]


async def published_window_ids(store: Store) -> frozenset[str]:
    """Return the windows whose trajectories lie in any repository."""
    rows = await store.pool.fetch(
        "SELECT DISTINCT window_id FROM babylon.published WHERE config = 'trajectories'"
        " AND revision <> ''"
    )
    return frozenset(row["window_id"] for row in rows)


async def record_published(store: Store, files: Sequence[PublishedFile]) -> None:
    """Enter files: without a revision before their commit, with it afterwards.

    A file that replaces another one takes its row.
    """
    marks = ", ".join(f"${i + 1}" for i in range(len(_COLUMNS)))
    changed = ", ".join(f"{name} = EXCLUDED.{name}" for name in _COLUMNS[3:])
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.executemany(
            f"INSERT INTO babylon.published ({', '.join(_COLUMNS)}) VALUES ({marks})"
            f" ON CONFLICT (repository, config, window_id) DO UPDATE SET {changed},"
            " published_at = now()",
            [astuple(file) for file in files],
        )


async def forget_begun(store: Store, files: Sequence[PublishedFile]) -> None:
    """Remove files from the ledger whose commit was begun and is not entered."""
    await store.pool.executemany(
        "DELETE FROM babylon.published WHERE revision = '' AND repository = $1 AND path = $2",
        [(file.repository, file.path) for file in files],
    )


@asynccontextmanager
async def publishing(store: Store) -> AsyncIterator[None]:
    """Hold the lock of the published dataset; commits and take-downs wait for each other."""
    async with _locked(store, "pg_advisory_xact_lock", _KEY):
        yield


@asynccontextmanager
async def writing(store: Store) -> AsyncIterator[Withheld]:
    """Let take-downs wait for the files of a window → what the files must leave out."""
    async with _locked(store, "pg_advisory_xact_lock_shared", _FILES_KEY):
        yield await read_withheld(store)


async def wait_for_writers(store: Store) -> None:
    """Wait for the files in the making: they may hold what was just taken down."""
    async with _locked(store, "pg_advisory_xact_lock", _FILES_KEY):
        pass


@asynccontextmanager
async def _locked(store: Store, function: str, key: int) -> AsyncIterator[None]:
    async with unlimited(store) as connection:
        await connection.execute(f"SELECT {function}($1)", key, timeout=_LONGEST_S)
        yield


async def read_withheld(store: Store) -> Withheld:
    """Return everything that was taken down."""
    rows = await store.pool.fetch("SELECT kind, name FROM babylon.withheld")
    return Withheld(
        agents=frozenset(row["name"] for row in rows if row["kind"] == "agent"),
        trajectories=frozenset(row["name"] for row in rows if row["kind"] == "trajectory"),
    )


async def withhold(store: Store, kind: str, name: str, reason: str) -> None:
    """Take an agent or a trajectory down. The first reason stays."""
    await store.pool.execute(
        "INSERT INTO babylon.withheld (kind, name, reason) VALUES ($1, $2, $3)"
        " ON CONFLICT DO NOTHING",
        kind,
        name,
        reason,
    )


# Weights keep what they have learnt, also of play that was released.
_LEARNT = (
    "SELECT trajectory_id FROM babylon.trained UNION SELECT trajectory_id FROM babylon.released"
)


async def withhold_plays(store: Store, trajectory_ids: Sequence[str], reason: str) -> None:
    """Take trajectories down by id: once the game's rows are deleted, nothing else tells of them.

    A window may be training on them now.
    """
    await store.pool.execute(
        "INSERT INTO babylon.withheld (kind, name, reason)"
        " SELECT 'trajectory', unnest($1::text[]), $2 ON CONFLICT DO NOTHING",
        list(trajectory_ids),
        reason,
    )


async def policies_of(store: Store, trajectory_ids: Sequence[str]) -> dict[int, str]:
    """Return the policies that learnt from these trajectories → how.

    That is ``trained``, ``released`` if the play was released since, or ``descendant``.
    """
    rows = await store.pool.fetch(
        """
        WITH RECURSIVE learnt AS (
            SELECT p.policy_version, 'trained' AS how FROM babylon.policies p
            WHERE EXISTS (SELECT FROM babylon.trained t WHERE t.batch_id = p.batch_id
                          AND t.trajectory_id = ANY($1))
            UNION
            SELECT policy_version, 'released' FROM babylon.released WHERE trajectory_id = ANY($1)
            UNION
            SELECT p.policy_version, 'descendant' FROM babylon.policies p
            JOIN learnt ON p.parent_version = learnt.policy_version
        )
        SELECT policy_version, max(how) AS how FROM learnt GROUP BY 1 ORDER BY 1
        """,
        list(trajectory_ids),
    )
    return {row["policy_version"]: row["how"] for row in rows}


async def was_trained(store: Store, trajectory_id: str) -> bool:
    """Return True if a policy learnt from the trajectory, whether or not its rows still exist."""
    return bool(
        await store.pool.fetchval(
            f"SELECT EXISTS (SELECT FROM ({_LEARNT}) AS learnt WHERE trajectory_id = $1)",
            trajectory_id,
        )
    )
