"""The table ``api_keys``: keys that the gateways accept, with the hash of each secret.

A key's id stays while its secret is replaced, because trajectories, limits and rules are the id's.

Changes are announced on the routes' channel. Gateways also read the table every few seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from babylon.core.api_keys import SCOPES, ApiKey, new_key
from babylon.core.errors import ConfigError
from babylon.store.connection import Store, affected
from babylon.store.routes import CHANNEL


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """A row of ``babylon.api_keys``.

    ``agents``: the agents that the key may call for, ``None`` for all; ``crowd-*`` stands for all
    ids that begin with ``crowd-``. The limits hold over all gateways; ``None`` for no limit.
    ``max_concurrency``: simultaneous calls. ``tokens_per_minute``: of prompts and answers.
    ``former_digest``: of the secret before the last rotation, accepted until ``former_until``.
    """

    key_id: str
    name: str
    digest: bytes
    scopes: tuple[str, ...]
    agents: tuple[str, ...] | None
    max_concurrency: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    created_at: datetime
    rotated_at: datetime | None
    revoked_at: datetime | None
    former_digest: bytes | None
    former_until: datetime | None


async def create_key(
    store: Store,
    name: str,
    *,
    scopes: Sequence[str],
    agents: Sequence[str] | None = None,
    max_concurrency: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
) -> ApiKey:
    """Make a key. Only the returned value holds its secret.

    Raises:
        ConfigError: the name or an agent is empty, a scope is unknown, or none is given.
    """
    _check(name, scopes, agents or ())
    key = new_key()
    may = list(dict.fromkeys(scopes)), None if agents is None else list(agents)
    limits = max_concurrency, requests_per_minute, tokens_per_minute
    await store.pool.execute(
        "INSERT INTO babylon.api_keys (key_id, name, digest, scopes, agents, max_concurrency,"
        " requests_per_minute, tokens_per_minute) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        *(key.key_id, name, key.digest, *may, *limits),
    )
    await _tell_gateways(store)
    return key


def _check(name: str, scopes: Sequence[str], agents: Sequence[str]) -> None:
    if not name.strip():
        raise ConfigError(f"the key's name is {name!r}: give it one that tells keys apart")
    if not all(map(str.strip, agents)):
        raise ConfigError(f"agents {list(agents)}: one of them is empty; name each")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise ConfigError(f"scopes {list(scopes)}: choose among {', '.join(SCOPES)}")


async def list_keys(store: Store) -> list[StoredKey]:
    """Return all keys, revoked ones too, newest first."""
    columns = ", ".join(field.name for field in fields(StoredKey))
    rows = await store.pool.fetch(
        f"SELECT {columns} FROM babylon.api_keys ORDER BY created_at DESC"
    )
    return [
        StoredKey(
            **{
                **row,
                "scopes": tuple(row["scopes"]),
                "agents": None if row["agents"] is None else tuple(row["agents"]),
            }
        )
        for row in rows
    ]


async def rotate_key(store: Store, key_id: str, overlap: timedelta) -> ApiKey:
    """Give a key another secret; the present one is accepted for ``overlap`` more.

    A revoked key is in force again with the new secret alone.

    Raises:
        ConfigError: there is no such key.
    """
    key = new_key(key_id)
    found = await store.pool.fetchval(_ROTATE, key_id, key.digest, overlap)
    if not found:
        raise ConfigError(f"there is no key {key_id!r}: see `babylon keys list`")
    await _tell_gateways(store)
    return key


async def revoke_key(store: Store, key_id: str) -> None:
    """Revoke a key.

    Raises:
        ConfigError: no key of that id is in force.
    """
    status = await store.pool.execute(
        "UPDATE babylon.api_keys SET revoked_at = now() WHERE key_id = $1 AND revoked_at IS NULL",
        key_id,
    )
    if not affected(status):
        raise ConfigError(f"no key {key_id!r} is in force: see `babylon keys list`")
    await _tell_gateways(store)


_ROTATE = """
UPDATE babylon.api_keys SET
    former_digest = CASE WHEN revoked_at IS NULL THEN digest END,
    former_until  = CASE WHEN revoked_at IS NULL THEN now() + $3::interval END,
    digest = $2, rotated_at = now(), revoked_at = NULL
WHERE key_id = $1 RETURNING key_id
"""


async def _tell_gateways(store: Store) -> None:
    await store.pool.execute("SELECT pg_notify($1, 'keys')", CHANNEL)
