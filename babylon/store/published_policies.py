"""The table ``published_policies``: which policy is in which model repository.

A row is written before the commit that holds the files, and gets its revision after it.
"""

from babylon.store.connection import Store


async def published_policies(store: Store, repository: str) -> dict[int, str]:
    """Return version → revision of the policies whose commit is in a repository."""
    rows = await store.pool.fetch(
        "SELECT policy_version, revision FROM babylon.published_policies WHERE repository = $1"
        " AND revision <> '' ORDER BY policy_version",
        repository,
    )
    return {row["policy_version"]: row["revision"] for row in rows}


async def record_published_policy(
    store: Store, repository: str, version: int, form: str, size: int, revision: str = ""
) -> None:
    """Enter a policy: without a revision before its commit, with it afterwards."""
    await store.pool.execute(
        "INSERT INTO babylon.published_policies VALUES ($1, $2, $3, $4, $5)"
        " ON CONFLICT (repository, policy_version) DO UPDATE SET form = EXCLUDED.form,"
        " bytes = EXCLUDED.bytes, revision = EXCLUDED.revision, published_at = now()",
        repository,
        version,
        form,
        size,
        revision,
    )


async def models_with(store: Store, versions: list[int]) -> list[tuple[str, int]]:
    """Return (repository, version) of the given policies that were, or may have been, published."""
    rows = await store.pool.fetch(
        "SELECT repository, policy_version FROM babylon.published_policies"
        " WHERE policy_version = ANY($1) ORDER BY 1, 2",
        versions,
    )
    return [(row["repository"], row["policy_version"]) for row in rows]
