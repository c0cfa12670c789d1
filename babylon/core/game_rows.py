"""The game's ``trajectories`` rows as one of ours: which columns are read, and which rows count.

Column names of the game are camelCase and therefore quoted. Its times are UTC without a zone;
Postgres knows infinity and years that no calendar here has, and such times are read as NULL.
"""

from dataclasses import dataclass
from datetime import datetime

import polars as pl

from babylon.core.windows import FIRST_YEAR, LAST_YEAR


def _in_calendar(column: str) -> str:
    bounds = f"'{FIRST_YEAR}-01-01' AND '{LAST_YEAR}-12-31'"
    return f"CASE WHEN {column} BETWEEN {bounds} THEN {column} AT TIME ZONE 'UTC' END"


COLUMNS = f"""
    t."trajectoryId" AS trajectory_id,
    t."agentId" AS agent_id,
    t."windowId" AS window_id,
    t."scenarioId" AS scenario_id,
    {_in_calendar('t."startTime"')} AS start,
    {_in_calendar('t."endTime"')} AS "end",
    t."totalReward" AS total_reward,
    t."finalPnL" AS final_pnl_usd,
    t."stepsJson" AS steps_json,
    t."metricsJson" AS metrics_json,
    t."metadataJson" AS metadata_json,
    t."rewardComponentsJson" AS reward_components_json
"""

UNTRAINED = """
    t."isTrainingData" AND NOT t."isEvaluation" AND NOT t."usedInTraining"
    AND NOT EXISTS (
        SELECT FROM babylon.trained d WHERE d.trajectory_id = t."trajectoryId"
    )
    AND NOT EXISTS (
        SELECT FROM babylon.late l WHERE l.trajectory_id = t."trajectoryId" AND admitted_to IS NULL
    )
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameRow:
    """One trajectory as the game wrote it, with what was joined to it; nothing is judged yet.

    ``logs_json`` and ``gateway_json`` are lists of ``quality.calls.LoggedCall`` and
    ``GatewayCall``; ``outcomes_json`` are the window's market outcomes: ground truth.
    """

    trajectory_id: str
    agent_id: str
    window_id: str | None
    scenario_id: str | None
    start: datetime | None
    end: datetime | None
    total_reward: float
    final_pnl_usd: float | None
    steps_json: str
    metrics_json: str
    metadata_json: str
    reward_components_json: str
    logs_json: str = "[]"
    gateway_json: str = "[]"
    outcomes_json: str = "[]"


GAME_SCHEMA = pl.Schema(
    [
        ("trajectory_id", pl.String),
        ("agent_id", pl.String),
        ("window_id", pl.String),
        ("scenario_id", pl.String),
        ("start", pl.Datetime("us", "UTC")),
        ("end", pl.Datetime("us", "UTC")),
        ("total_reward", pl.Float64),
        ("final_pnl_usd", pl.Float64),
        ("steps_json", pl.String),
        ("metrics_json", pl.String),
        ("metadata_json", pl.String),
        ("reward_components_json", pl.String),
        ("logs_json", pl.String),
        ("gateway_json", pl.String),
        ("outcomes_json", pl.String),
    ]
)
