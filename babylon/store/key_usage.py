"""The table ``key_usage``: what each gateway admitted for the keys that have limits."""

from collections.abc import Mapping
from dataclasses import dataclass

from babylon.store.connection import Store
from babylon.store.gateways import LIVE_S


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """Requests and tokens of one minute, and the calls that run now."""

    minute: int
    requests: int = 0
    tokens: int = 0
    running: int = 0


async def exchange_usage(
    store: Store, gateway_id: str, own: Mapping[str, KeyUsage]
) -> dict[str, list[KeyUsage]]:
    """Write this gateway's usage by key, and return that of the other live gateways."""
    if not own:
        return {}
    listed = [(key, one.minute, one.requests, one.tokens, one.running) for key, one in own.items()]
    columns = zip(*listed, strict=True)
    rows = await store.pool.fetch(_EXCHANGE, gateway_id, *columns, LIVE_S)
    others: dict[str, list[KeyUsage]] = {key: [] for key in own}
    for key_id, *usage in rows:
        others[key_id].append(KeyUsage(*usage))
    return others


async def live_gateway_count(store: Store) -> int:
    """Return the number of gateways that showed themselves lately."""
    count: int = await store.pool.fetchval(
        "SELECT count(*) FROM babylon.gateways WHERE seen_at > now() - $1 * interval '1 s'", LIVE_S
    )
    return count


_EXCHANGE = """
WITH gone AS (
    DELETE FROM babylon.key_usage WHERE seen_at < now() - interval '1 hour'
), own AS (
    INSERT INTO babylon.key_usage (key_id, gateway_id, minute, requests, tokens, running)
    SELECT key_id, $1, minute, requests, tokens, running
    FROM unnest($2::text[], $3::bigint[], $4::int[], $5::bigint[], $6::int[])
         AS u (key_id, minute, requests, tokens, running)
    ON CONFLICT (key_id, gateway_id) DO UPDATE SET
        minute = excluded.minute, requests = excluded.requests, tokens = excluded.tokens,
        running = excluded.running, seen_at = now()
)
SELECT key_id, minute, requests, tokens, running FROM babylon.key_usage
WHERE key_id = ANY($2) AND gateway_id <> $1 AND seen_at > now() - $7 * interval '1 s'
"""
