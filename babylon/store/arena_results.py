"""The arena's tables: frozen suites of worlds, and each player's result on them."""

from babylon.core.errors import ArenaError
from babylon.store.connection import Store


async def register_suite(
    store: Store, name: str, version: int, *, digest: str, scenarios: int
) -> None:
    """Store a suite's digest at its first use, and compare it at every later use.

    Raises:
        ArenaError: the digest differs from the registered one.
    """
    known = await store.pool.fetchval(
        "WITH added AS (INSERT INTO babylon.suites (name, version, digest, scenarios)"
        " VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING digest)"
        " SELECT digest FROM added UNION ALL"
        " SELECT digest FROM babylon.suites WHERE name = $1 AND version = $2",
        name,
        version,
        digest,
        scenarios,
    )
    if known != digest:
        raise ArenaError(
            f"suite {name}@{version} was registered here with digest {known[:16]}…, this program"
            f" makes worlds of digest {digest[:16]}…: the game changed, so results cannot be"
            " compared; use the program that registered it, or give the suite a new version"
        )


async def stored_result(
    store: Store, suite_digest: str, player: str, seed: int
) -> dict[str, object] | None:
    """Return a player's result on a suite, ``None`` before the player has played it."""
    result: dict[str, object] | None = await store.pool.fetchval(
        "SELECT result FROM babylon.arena_results"
        " WHERE suite_digest = $1 AND player = $2 AND seed = $3",
        suite_digest,
        player,
        seed,
    )
    return result


async def store_result(
    store: Store, suite_digest: str, player: str, seed: int, result: dict[str, object]
) -> None:
    """Store a result. Play is deterministic, so a result that is already stored is kept."""
    await store.pool.execute(
        "INSERT INTO babylon.arena_results (suite_digest, player, seed, result)"
        " VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        suite_digest,
        player,
        seed,
        result,
    )
