"""Experiments: the tables ``trajectory_arms`` and ``experiment_reviews``, calls and plays.

A trajectory ends in the arm in which it began, although the challenger's share may change
meanwhile. The first gateway that answers the trajectory chooses the arm for all gateways.

A call belongs to the experiment of the route under which it was answered. A play (trajectory)
belongs to the experiment of its calls. From the game's tables these queries read only the columns
that every writer fills, and the beginning of ``stepsJson``: profit inside a play is its last known
lifetime P&L minus that of the first step. They may be in another database than the calls, so no
query reads both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from babylon.core.types import Arm
from babylon.store.connection import Connection, Store
from babylon.store.routes import Mode, Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The routes of one salt. Each of ``stages`` is the route versions of one share."""

    salt: str
    mode: Mode
    champion_version: int
    challenger_version: int
    shares: tuple[float, ...]
    stages: tuple[tuple[int, ...], ...]
    began_at: datetime
    ended_at: datetime | None

    @property
    def staged_routes(self) -> tuple[list[int], list[int]]:
        """All route versions, and the stage of each."""
        pairs = [(route, i) for i, stage in enumerate(self.stages) for route in stage]
        return [route for route, _ in pairs], [stage for _, stage in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCalls:
    """Counts of one unit's calls in one stage; a unit is an agent, or an API key without an agent.

    ``challenger``: the unit's first arm in the stage was the challenger. ``both``: it was answered
    by both arms. ``broken_off`` calls ended in an error, ``cut`` ones at the token limit. Latencies
    are in milliseconds.
    """

    unit: str
    stage: int
    challenger: bool
    both: bool
    calls: int
    broken_off: int
    cut: int
    median_ms: float
    p95_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A trajectory with calls in the experiment. Until its row is written, ``start`` is ``None``.

    ``mixed``: some of its calls were answered by another arm, by a pinned version, or before or
    after the experiment. ``opening_*`` are of the first step, ``None`` when they are not in the
    beginning of ``stepsJson``.
    """

    trajectory_id: str
    unit: str
    stage: int
    mixed: bool
    start: datetime | None = None
    evaluation: bool = False
    final_pnl: float | None = None
    opening_pnl: float | None = None
    opening_balance: float | None = None
    metrics_json: str | None = None


async def find_experiment(store: Store, salt: str | None = None) -> Experiment | None:
    """Return the experiment of ``salt``, by default the running one; ``None`` if there is none."""
    if salt is None:
        salt = await store.pool.fetchval(
            "SELECT salt FROM babylon.routes ORDER BY route_version DESC LIMIT 1"
        )
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.routes WHERE salt = $1 ORDER BY route_version", salt
    )
    if not rows:
        return None
    routes = [Route(**row) for row in rows]
    last = routes[-1]
    split = last.split
    assert split is not None and salt is not None  # the query selects routes with a salt
    shares, stages = _stages(routes)
    return Experiment(
        salt=salt,
        mode=split.mode,
        champion_version=last.policy_version,
        challenger_version=split.challenger_version,
        shares=shares,
        stages=stages,
        began_at=routes[0].created_at,
        ended_at=await store.pool.fetchval(
            "SELECT min(created_at) FROM babylon.routes WHERE route_version > $1",
            last.route_version,
        ),
    )


def _stages(routes: Sequence[Route]) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]:
    shares: list[float] = []
    stages: list[tuple[int, ...]] = []
    for route in routes:
        assert route.share is not None  # routes with a salt have a share
        if shares and route.share == shares[-1]:
            stages[-1] += (route.route_version,)
        else:
            shares.append(route.share)
            stages.append((route.route_version,))
    return tuple(shares), tuple(stages)


async def agent_calls(connection: Connection, experiment: Experiment) -> list[AgentCalls]:
    """Return the calls of each agent in each stage, in either arm."""
    rows = await connection.fetch(_AGENTS, *experiment.staged_routes)
    return [AgentCalls(**row) for row in rows]


async def pinned_calls(connection: Connection, experiment: Experiment) -> int:
    """Return the number of calls that asked for a policy version by name; they have no arm."""
    count: int = await connection.fetchval(
        "SELECT count(*) FROM babylon.calls WHERE route_version = ANY($1) AND arm = 'pinned'",
        experiment.staged_routes[0],
    )
    return count


async def plays(connection: Connection, game: Connection, experiment: Experiment) -> list[Play]:
    """Return every trajectory that the experiment's calls name. ``game`` reads the game's tables.

    A call that names the trajectory of another agent or key is ignored, as in collecting.
    """
    routes = experiment.staged_routes
    names = [row[0] for row in await connection.fetch(_NAMED, *routes)]
    written = {row["trajectory_id"]: dict(row) for row in await game.fetch(_WRITTEN, names)}
    agents = [written[name].pop("agent_id") if name in written else None for name in names]
    found = await connection.fetch(_PLAYED, *routes, names, agents)
    return [Play(**written.get(row["trajectory_id"], {}) | dict(row)) for row in found]


async def plays_before(
    game: Connection, experiment: Experiment, agents: Sequence[str], since: datetime
) -> list[Play]:
    """Return the agents' plays from ``since`` on that were written before the experiment began.

    ``createdAt`` dates the writing. ``startTime`` cannot: simulated play may carry any date.
    """
    rows = await game.fetch(_BEFORE, list(agents), since, experiment.began_at)
    return [Play(**row) for row in rows]


async def steps_of(game: Connection, trajectory_ids: Sequence[str]) -> dict[str, str]:
    """Return trajectory id → ``stepsJson``."""
    rows = await game.fetch(
        'SELECT "trajectoryId", "stepsJson"::text FROM trajectories'
        ' WHERE "trajectoryId" = ANY($1::text[])',
        list(trajectory_ids),
    )
    return {name: text for name, text in rows}


async def scores_of(connection: Connection, trajectory_ids: Sequence[str]) -> dict[str, float]:
    """Return trajectory id → the score in the first window that scored it."""
    rows = await connection.fetch(
        "SELECT DISTINCT ON (trajectory_id) trajectory_id, score FROM babylon.scores"
        " WHERE trajectory_id = ANY($1::text[]) ORDER BY trajectory_id, window_id",
        list(trajectory_ids),
    )
    return {name: score for name, score in rows}


async def keep_review(
    store: Store, salt: str, reviewed_at: datetime, decision: str, numbers: dict[str, object]
) -> None:
    """Store the decision and the numbers of one review."""
    await store.pool.execute(
        "INSERT INTO babylon.experiment_reviews (salt, reviewed_at, decision, numbers)"
        " VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        salt,
        reviewed_at,
        decision,
        numbers,
    )


async def newest_decision(store: Store, salt: str, within: timedelta) -> str | None:
    """Return the decision of an experiment's newest review, ``None`` if it is not that young."""
    decision: str | None = await store.pool.fetchval(
        "SELECT decision FROM babylon.experiment_reviews WHERE salt = $1"
        " AND reviewed_at > now() - $2::interval ORDER BY reviewed_at DESC LIMIT 1",
        salt,
        within,
    )
    return decision


async def newest_numbers(store: Store, salt: str) -> dict[str, Any] | None:
    """Return the numbers of an experiment's newest review, ``None`` before the first one."""
    numbers: dict[str, Any] | None = await store.pool.fetchval(
        "SELECT numbers FROM babylon.experiment_reviews WHERE salt = $1"
        " ORDER BY reviewed_at DESC LIMIT 1",
        salt,
    )
    return numbers


_STAGES = "unnest($1::bigint[], $2::int[]) AS s (route_version, stage)"

# A trajectory keeps its arm when the share changes: its later calls tell nothing of the new share.
_STAGED = f"""(
    SELECT c.agent_id, c.key_id, c.arm, c.started_at, c.finish_reason, c.latency_ms,
        CASE WHEN c.trajectory_id IS NULL OR starts_with(c.trajectory_id, 'session-') THEN s.stage
            ELSE min(s.stage) OVER (PARTITION BY c.trajectory_id) END AS stage
    FROM babylon.calls c JOIN {_STAGES} USING (route_version)
    WHERE c.arm <> 'pinned' AND coalesce(c.agent_id, c.key_id) IS NOT NULL
) AS c"""

_AGENTS = f"""
SELECT coalesce(c.agent_id, c.key_id) AS unit, c.stage,
    coalesce(min(c.started_at) FILTER (WHERE c.arm = 'challenger')
        < min(c.started_at) FILTER (WHERE c.arm = 'champion'), bool_and(c.arm = 'challenger'))
        AS challenger,
    min(c.arm) <> max(c.arm) AS both,
    count(*)::int AS calls,
    (count(*) FILTER (WHERE c.finish_reason NOT IN ('stop', 'length', 'tool_calls')))::int
        AS broken_off,
    (count(*) FILTER (WHERE c.finish_reason = 'length'))::int AS cut,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY c.latency_ms) AS median_ms,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY c.latency_ms) AS p95_ms
FROM {_STAGED}
GROUP BY 1, 2 ORDER BY 2, 1
"""

# Only as many digits as a float8 can hold: one number beyond it would fail the query of all plays.
_NUMBER = r"\s*:\s*(-?[0-9]{1,18}(?:\.[0-9]{1,25})?(?:[eE][-+]?[0-9]{1,2})?)\s*[,}]"


def _opening(key: str) -> str:
    """Return SQL for a number of the first step's state, if that is flat and comes first."""
    pattern = rf'^[^{{]*\{{[^{{]*"environmentState"\s*:\s*\{{[^{{}}]*"{key}"{_NUMBER}'
    return f"""substring(left(t."stepsJson"::text, 4096) FROM '{pattern}')::float8"""


_COLUMNS = f"""
    t."startTime" AT TIME ZONE 'UTC' AS start, coalesce(t."isEvaluation", false) AS evaluation,
    t."finalPnL"::float8 AS final_pnl, {_opening("agentPnL")} AS opening_pnl,
    {_opening("agentBalance")} AS opening_balance, t."metricsJson"::text AS metrics_json
"""

# Recognised sessions keep no arm, so they compare none.
_NAMED = f"""
SELECT DISTINCT c.trajectory_id FROM babylon.calls c JOIN {_STAGES} USING (route_version)
WHERE c.trajectory_id IS NOT NULL AND c.arm <> 'pinned'
    AND NOT starts_with(c.trajectory_id, 'session-')
"""

_WRITTEN = f"""
SELECT t."trajectoryId" AS trajectory_id, t."agentId" AS agent_id, {_COLUMNS}
FROM trajectories t WHERE t."trajectoryId" = ANY($1::text[])
"""

_PLAYED = f"""
SELECT * FROM (
    SELECT trajectory_id, min(coalesce(c.agent_id, c.key_id)) AS unit, min(s.stage) AS stage,
        min(c.arm) <> max(c.arm) OR bool_or(s.stage IS NULL) AS mixed
    FROM unnest($3::text[], $4::text[]) AS t (trajectory_id, agent_id)
        JOIN babylon.calls c USING (trajectory_id)
        LEFT JOIN babylon.plays p USING (trajectory_id)
        LEFT JOIN {_STAGES} USING (route_version)
    WHERE (t.agent_id IS NULL OR coalesce(c.agent_id, t.agent_id) = t.agent_id)
        AND coalesce(p.key_id = c.key_id, true)
    GROUP BY 1
) AS played
WHERE unit IS NOT NULL AND stage IS NOT NULL ORDER BY trajectory_id COLLATE "C"
"""

_BEFORE = f"""
SELECT t."trajectoryId" AS trajectory_id, t."agentId" AS unit, 0 AS stage, false AS mixed,
    {_COLUMNS}
FROM trajectories t
WHERE t."agentId" = ANY($1::text[]) AND t."startTime" >= $2::timestamptz AT TIME ZONE 'UTC'
    AND t."createdAt" < $3::timestamptz AT TIME ZONE 'UTC' AND NOT t."isEvaluation"
ORDER BY t."trajectoryId" COLLATE "C"
"""


async def pin_arm(store: Store, salt: str, trajectory_id: str, arm: Arm) -> Arm:
    """Store ``arm`` unless the trajectory has an arm already; return the arm it has."""
    pinned: Arm = await store.pool.fetchval(  # the update changes nothing, but returns the row
        "INSERT INTO babylon.trajectory_arms AS pinned (salt, trajectory_id, arm)"
        " VALUES ($1, $2, $3) ON CONFLICT (salt, trajectory_id) DO UPDATE SET arm = pinned.arm"
        " RETURNING arm",
        salt,
        trajectory_id,
        arm,
    )
    return pinned


async def pin_arms(store: Store, arms: Mapping[tuple[str, str], Arm]) -> None:
    """Store (salt, trajectory id) → arm for the trajectories that have no arm yet."""
    await store.pool.executemany(
        "INSERT INTO babylon.trajectory_arms (salt, trajectory_id, arm) VALUES ($1, $2, $3)"
        " ON CONFLICT DO NOTHING",
        [(*trajectory, arm) for trajectory, arm in arms.items()],
    )


async def forget_arms(store: Store, after: timedelta) -> None:
    """Delete the arms of experiments that ended longer ago than ``after``."""
    await store.pool.execute(_FORGET, after)


_FORGET = """
DELETE FROM babylon.trajectory_arms WHERE salt IN (
    SELECT salt
    FROM (SELECT salt, lead(created_at) OVER (ORDER BY route_version) AS until
          FROM babylon.routes) AS reign
    WHERE salt IS NOT NULL GROUP BY salt
    HAVING bool_and(until IS NOT NULL) AND max(until) < now() - $1::interval
)
"""
