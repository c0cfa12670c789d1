"""The columns of a score: who scored, with which rubric and model, and for which reasons."""

from typing import Any

import msgspec

from babylon.store import Store

ScoreColumns = dict[str, Any]

_SCORES = """
    SELECT trajectory_id, scorer, low, high, components, reasons
    FROM babylon.scores WHERE window_id = $1
"""
_JUDGES = """
    SELECT name, string_agg(DISTINCT judge, ', ') AS judge, max(rubric) AS rubric
    FROM babylon.judgments CROSS JOIN unnest(trajectory_ids) AS name
    WHERE window_id = $1 AND problem IS NULL AND NOT starts_with(judge, 'person:')
    GROUP BY name
"""


async def read_scores(store: Store, window_id: str) -> dict[str, ScoreColumns]:
    """Return trajectory → columns of its score. Without a judge, model and rubric are null."""
    judges = {row["name"]: row for row in await store.pool.fetch(_JUDGES, window_id)}
    columns = {}
    for row in await store.pool.fetch(_SCORES, window_id):
        # A window may be judged in part and then scored by the heuristic, which has no intervals.
        judge = judges.get(row["trajectory_id"]) if row["low"] is not None else None
        columns[row["trajectory_id"]] = {
            "scorer": row["scorer"],
            "judge_model": judge and judge["judge"],
            "rubric": judge and judge["rubric"],
            "score_low": row["low"],
            "score_high": row["high"],
            "score_components_json": msgspec.json.encode(row["components"]).decode(),
            "score_reasons": list(row["reasons"]),
        }
    return columns
