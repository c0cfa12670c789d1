"""The game's tables: are they there, and can their columns be read?

The game declares them, and another version of it may declare them otherwise. The check names each
column that is missing or of another kind, so that no stage fails in the middle of a query.
"""

from collections.abc import Mapping, Sequence

import asyncpg

from babylon.store.session import Connection, Pool, Session

GAME_TABLES = ("trajectories", "llm_call_logs", "market_outcomes")

# Kinds of columns by the names of their types. JSON is read as text from either.
_KINDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "varchar", "bpchar"}),
    "JSON": frozenset({"text", "varchar", "json", "jsonb"}),
    "timestamp without time zone": frozenset({"timestamp"}),
    "number": frozenset({"float8", "float4", "numeric", "int2", "int4", "int8"}),
    "boolean": frozenset({"bool"}),
    "anything": frozenset(),
}
_EXPECTED: Mapping[str, Mapping[str, str]] = {
    "trajectories": {
        "text": "trajectoryId agentId windowId scenarioId",
        "JSON": "stepsJson metricsJson metadataJson rewardComponentsJson",
        "timestamp without time zone": "startTime endTime createdAt updatedAt",
        "number": "totalReward finalPnL windowHours",
        "boolean": "isTrainingData isEvaluation usedInTraining",
    },
    "llm_call_logs": {
        "text": "trajectoryId callId response",
        "JSON": "messagesJson",
        "number": "topP",
        "anything": "timestamp",
    },
    "market_outcomes": {
        "text": "id windowId",
        "number": "startPrice endPrice changePercent finalProbability",
        "anything": "stockTicker sentiment newsEvents predictionMarketId question outcome",
    },
}

# The type of a domain is the one that it is based on.
_COLUMNS = """
SELECT c.relname, a.attname, coalesce(base.typname, t.typname) AS type
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type base ON base.oid = nullif(t.typbasetype, 0)
WHERE n.nspname = $1 AND c.relname = ANY($2::text[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
_TABLES = """
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = ANY($2::text[]) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""
# A replica has the identity of its primary, also if another address leads to it.
_IDENTITY = """
SELECT c.system_identifier::text || ' ' || d.oid
FROM pg_control_system() c, pg_database d WHERE d.datname = current_database()
"""

# Calls and logs repeat what the steps say, so that the steps tell how much a trajectory has. If
# they are text, Postgres knows their length without reading them.
_BATCHES = """
SELECT array_agg(id ORDER BY id COLLATE "C") FROM (
    SELECT t."trajectoryId" AS id, div(sum(octet_length(t."stepsJson"::text) + $2::bigint)
        OVER (ORDER BY t."trajectoryId" COLLATE "C"), $3::bigint) AS batch
    FROM trajectories t WHERE t."trajectoryId" = ANY($1::text[])
) AS numbered GROUP BY batch ORDER BY batch
"""
_BATCH_ROWS, _BATCH_BYTES = 100, 2**25


async def batches_of_plays(session: "Connection | Pool", ids: Sequence[str]) -> list[list[str]]:
    """Split trajectories into batches that fit into memory, in the order of their ids.

    A batch has about 100 trajectories, or 32 MiB of steps and one trajectory more.
    """
    each = _BATCH_BYTES // _BATCH_ROWS
    return [row[0] for row in await session.fetch(_BATCHES, list(ids), each, _BATCH_BYTES)]


async def tables_present(connection: "Connection | Session", schema: str) -> bool:
    """Return True if the schema has all of the game's tables."""
    return bool(await connection.fetchval(_TABLES, schema, list(GAME_TABLES)) == len(GAME_TABLES))


async def game_problem(connection: Connection, schema: str, apart: bool) -> str:
    """Return why play cannot be read, with the remedy; empty if it can.

    ``apart``: the tables are read through GAME_DATABASE_URL.
    """
    variable = "GAME_DATABASE_URL" if apart else "DATABASE_URL"
    found: dict[str, dict[str, str]] = {name: {} for name in GAME_TABLES}
    for table, column, kind in await connection.fetch(_COLUMNS, schema, list(GAME_TABLES)):
        found[table][column] = kind
    if missing := [name for name, columns in found.items() if not columns]:
        return (
            f"the database has no game tables ({', '.join(missing)} in schema {schema}): point"
            f" {variable} at the game's database"
            + ("" if apart else ", or unset it for the embedded one")
        )
    problems = [
        problem
        for table, kinds in _EXPECTED.items()
        for kind, columns in kinds.items()
        for column in columns.split()
        if (problem := _problem(table, column, kind, found[table]))
    ]
    if not problems:
        return ""
    return (
        f"the game's tables in schema {schema} cannot be read: {'; '.join(problems)}. Migrate the"
        f" game's database, or give {variable} a schema with views that have these columns"
        " (?schema=NAME)"
    )


async def is_same_database(own: Connection, game: Connection) -> bool:
    """Return True if both connections lead to one database, or to a replica of it."""
    try:
        identities = [await one.fetchval(_IDENTITY) for one in (own, game)]
    except asyncpg.InsufficientPrivilegeError:  # some hosts hide it
        return False
    return bool(identities[0] == identities[1])


def _problem(table: str, column: str, kind: str, found: Mapping[str, str]) -> str:
    if column not in found:
        return f'{table}."{column}" is missing ({kind})'
    allowed = _KINDS[kind]
    if allowed and found[column] not in allowed:
        return f'{table}."{column}" is {found[column]}, not {kind}'
    return ""
