"""Lineage: from which policy each policy was trained, and how many updates separate two policies.

Version numbers count every commit, challengers that never served too. Two policies whose numbers
differ by nine may be parent and child. The distance between the policy that sampled a call and the
policy that is trained on it is the number of updates between them.
"""

from collections.abc import Iterator, Mapping, Sequence

from babylon.store.connection import Store

_LINE = (
    "WITH RECURSIVE line AS (SELECT policy_version, parent_version, batch_id FROM babylon.policies"
    " WHERE policy_version = $1 UNION SELECT p.policy_version, p.parent_version, p.batch_id"
    " FROM babylon.policies p JOIN line ON p.policy_version = line.parent_version)"
)


async def parents(store: Store) -> dict[int, int | None]:
    """Return each version → the version that it was trained from."""
    rows = await store.pool.fetch("SELECT policy_version, parent_version FROM babylon.policies")
    return {row["policy_version"]: row["parent_version"] for row in rows}


async def descends(store: Store, version: int, ancestor: int) -> bool:
    """Return True if ``version`` was trained from ``ancestor``, over any number of windows."""
    return bool(
        await store.pool.fetchval(
            "WITH RECURSIVE line AS (SELECT parent_version FROM babylon.policies"
            " WHERE policy_version = $1 UNION SELECT p.parent_version FROM babylon.policies p"
            " JOIN line ON p.policy_version = line.parent_version)"
            " SELECT true FROM line WHERE parent_version = $2 LIMIT 1",
            version,
            ancestor,
        )
    )


async def rejected_child(store: Store, version: int) -> tuple[str, dict[str, object]] | None:
    """Return checkpoint and metrics of the newest policy trained from ``version`` and rejected."""
    row = await store.pool.fetchrow(
        "SELECT uri, metrics FROM babylon.policies WHERE parent_version = $1"
        " AND removed_at IS NULL AND verdict->>'promote' = 'false'"
        " ORDER BY policy_version DESC LIMIT 1",
        version,
    )
    return None if row is None else (store.home.resolve(row["uri"]), row["metrics"])


async def trained_into(store: Store, version: int, trajectory_ids: Sequence[str]) -> frozenset[str]:
    """Return the trajectories on which the policy, or a policy it descends from, was trained.

    Those that it released count too: its weights have learnt from them.
    """
    rows = await store.pool.fetch(
        f"{_LINE} SELECT trajectory_id FROM babylon.trained JOIN line USING (batch_id)"
        " WHERE trajectory_id = ANY($2) UNION SELECT trajectory_id FROM babylon.released"
        " JOIN line USING (policy_version) WHERE trajectory_id = ANY($2)",
        version,
        trajectory_ids,
    )
    return frozenset(row["trajectory_id"] for row in rows)


async def windows_trained_into(store: Store, version: int) -> frozenset[str]:
    """Return the keys of the windows on which the policy, or one it descends from, was trained."""
    rows = await store.pool.fetch(  # `trained` has a row for each trajectory of every year
        f"{_LINE} SELECT DISTINCT window_id FROM babylon.policies JOIN line USING (policy_version)"
        " WHERE window_id IS NOT NULL",
        version,
    )
    return frozenset(row["window_id"] for row in rows)


def staleness(parents: Mapping[int, int | None], trained: int) -> dict[int, int]:
    """Return version → number of updates between it and ``trained``.

    For an ancestor that is the number of generations. For a policy of another branch, such as one
    that was rolled back, it is the number of updates from it down to the common ancestor and up to
    ``trained``. Versions that descend from another base are absent.

    Args:
        parents: version → the version that it was trained from; None for a base model.

    Example:
        ``staleness({0: None, 1: 0, 2: 1, 3: 1}, 3)`` is ``{3: 0, 1: 1, 0: 2, 2: 2}``.
    """
    own = {version: depth for depth, version in enumerate(_line(parents, trained))}
    result: dict[int, int] = {}
    for version in parents:
        for depth, ancestor in enumerate(_line(parents, version)):
            if ancestor in own:
                result[version] = depth + own[ancestor]
                break
    return result


def _line(parents: Mapping[int, int | None], version: int) -> Iterator[int]:
    current: int | None = version
    while current is not None and current in parents:
        yield current
        current = parents[current]
