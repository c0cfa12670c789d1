"""The table ``scenarios``: the played scenarios, for replay.

``knowledge_json`` is the whole scenario with outcomes and future prices. It is the only column with
ground truth. Each window has one immutable file. Scenarios that cannot be rebuilt are left out.
"""

from collections.abc import Iterable
from statistics import fmean

import msgspec
import polars as pl

from babylon.core.artifacts import iter_artifact, write_artifact
from babylon.core.home import Home
from babylon.core.types import Published, Scored
from babylon.evaluation.rebuild.recorded import Rebuilt, RecordedRow, RecordedScenario, RecordedStep
from babylon.evaluation.rebuild.recorded_windows import rebuild_rows
from babylon.quality.decode import decode

TABLE = "scenarios"
SCHEMA = pl.Schema(
    [
        ("scenario_id", pl.String),
        ("window_id", pl.String),
        ("ticks", pl.Int64),
        ("markets", pl.Int64),
        ("perps", pl.Int64),
        ("prices", pl.String),
        ("missing", pl.List(pl.String)),
        ("players", pl.List(pl.String)),
        ("questions", pl.List(pl.String)),
        ("trajectory_ids", pl.List(pl.String)),
        ("agents", pl.Int64),
        ("mean_pnl_usd", pl.Float64),
        ("best_pnl_usd", pl.Float64),
        ("knowledge_json", pl.String),
        ("month", pl.String),
    ]
)
_COLUMNS = (
    "trajectory_id",
    "agent_id",
    "window_id",
    "scenario_id",
    "pnl_usd",
    "game_json",
    "knowledge_json",
)


def publish_scenarios(home: Home, scored: Scored) -> tuple[Published, Rebuilt]:
    """Write the window's scenarios into the local dataset folder → (file, rebuilt scenarios)."""
    window_id = scored.claim.window_id
    rebuilt = rebuild_rows(list(_rows(home, scored)))
    month = window_id[: len("YYYY-MM")]
    frame = pl.DataFrame([_row(one, month) for one in rebuilt.scenarios], schema=SCHEMA)
    directory = home.datasets / TABLE / f"month={month}"
    file = write_artifact(home, frame, window_id=window_id, directory=directory)
    published = Published(window_id=window_id, uri=file.uri, sha256=file.sha256, rows=file.rows)
    return published, rebuilt


def _rows(home: Home, scored: Scored) -> Iterable[RecordedRow]:
    for frame in iter_artifact(home, scored.artifact, _COLUMNS):
        for row in frame.iter_rows(named=True):
            steps = decode(row.pop("game_json"), tuple[RecordedStep, ...], "stepsJson")
            knowledge = msgspec.json.decode(row.pop("knowledge_json"))
            yield RecordedRow(
                **row,
                steps=steps,
                knowledge=knowledge["game_knowledge"],
                outcomes=tuple(knowledge["market_outcomes"]),
            )


def _row(recorded: RecordedScenario, month: str) -> dict[str, object]:
    scenario = recorded.scenario
    pnl = [play.pnl_usd for play in recorded.plays]
    return {
        "scenario_id": scenario.scenario_id,
        "window_id": recorded.window_id,
        "ticks": scenario.rules.ticks,
        "markets": len(scenario.questions),
        "perps": len(scenario.perps),
        "prices": recorded.prices,
        "missing": list(recorded.missing),
        "players": list(recorded.players),
        "questions": [question.text for question in scenario.questions],
        "trajectory_ids": [play.trajectory_id for play in recorded.plays],
        "agents": len({play.agent_id for play in recorded.plays}),
        "mean_pnl_usd": fmean(pnl),
        "best_pnl_usd": max(pnl),
        "knowledge_json": msgspec.json.encode(scenario, order="deterministic").decode(),
        "month": month,
    }
