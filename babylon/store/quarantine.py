"""The tables ``quarantine`` and ``gateway_probes``: gateways not waited for, and probe keys."""

from collections.abc import Mapping, Sequence

from babylon.store.connection import Store


async def quarantined(store: Store) -> dict[str, str]:
    """Return gateway id → reason, for gateways that deployments do not wait for."""
    rows = await store.pool.fetch("SELECT gateway_id, reason FROM babylon.quarantine")
    return {row["gateway_id"]: row["reason"] for row in rows}


async def quarantine(store: Store, reasons: Mapping[str, str]) -> None:
    """Stop waiting for gateways, until they follow again."""
    await store.pool.executemany(
        "INSERT INTO babylon.quarantine (gateway_id, reason)"
        " SELECT gateway_id, $2 FROM babylon.gateways WHERE gateway_id = $1"
        " ON CONFLICT (gateway_id) DO UPDATE SET reason = excluded.reason",
        [*reasons.items()],
    )


async def end_quarantine(store: Store, gateway_id: str) -> None:
    """Wait for a gateway again, if it serves the newest route and holds all that is proposed."""
    await store.pool.execute(
        "DELETE FROM babylon.quarantine AS q USING babylon.gateways AS g"
        " WHERE q.gateway_id = $1 AND g.gateway_id = q.gateway_id"
        " AND g.route_version >= (SELECT max(route_version) FROM babylon.routes)"
        " AND NOT EXISTS (SELECT FROM babylon.proposals WHERE outcome IS NULL"
        " AND open_until > now() AND policy_version <> ALL (g.loaded))",
        gateway_id,
    )


async def probe_keys(store: Store, gateway_ids: Sequence[str]) -> dict[str, str]:
    """Return gateway id → the key for its probes. Gateways of older versions have none."""
    rows = await store.pool.fetch(
        "SELECT gateway_id, probe_key FROM babylon.gateway_probes WHERE gateway_id = ANY($1)",
        list(gateway_ids),
    )
    return {row["gateway_id"]: row["probe_key"] for row in rows}
