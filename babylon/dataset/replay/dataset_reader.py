"""Scenarios and replies read from a dataset's tables ``scenarios`` and ``trajectories``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec
import polars as pl

from babylon.core.errors import ReplayError
from babylon.evaluation.rebuild.recorded import (
    Prices,
    Rebuilt,
    RecordedPlay,
    RecordedScenario,
    Skipped,
)
from babylon.game.market.scenario import Scenario

SCENARIOS, TRAJECTORIES = "scenarios", "trajectories"
_DEEPEST = 4  # <dataset>/<table>/<month>/<file>


class ScenarioRow(TypedDict):
    """A row of the table ``scenarios``; the columns that replay reads."""

    window_id: str
    players: list[str]
    prices: Prices
    missing: list[str]
    trajectory_ids: list[str]
    knowledge_json: str


class TrajectoryRow(TypedDict):
    """A row of the table ``trajectories``; the columns that replay reads."""

    trajectory_id: str
    agent_id: str
    window_id: str
    scenario_id: str
    pnl_usd: float
    calls: list[dict[str, Any]]


_COLUMNS = {
    SCENARIOS: list(ScenarioRow.__annotations__),
    TRAJECTORIES: list(TrajectoryRow.__annotations__),
}


def read_dataset(place: Path, prefix: str) -> Rebuilt:
    """Read the scenarios of the windows whose id begins with ``prefix``.

    ``place`` is a dataset's folder, a folder or a file inside it. A ``trajectories`` file limits
    the plays to its own.

    Raises:
        ReplayError: The path does not exist, lacks one of the two tables, or has no such window.
    """
    if not place.exists():
        raise ReplayError(f"{place} does not exist: give a dataset's folder or one of its files")
    root = _root(place)
    only = place if place.is_file() and place.parent.parent.name == TRAJECTORIES else None
    trajectories = _read(root, TRAJECTORIES, prefix, only)
    plays = {
        row["trajectory_id"]: _play(cast(TrajectoryRow, row))
        for row in trajectories.iter_rows(named=True)
    }
    known = [
        _scenario(cast(ScenarioRow, row), plays)
        for row in _read(root, SCENARIOS, prefix, None).iter_rows(named=True)
    ]
    played = {play.trajectory_id for one in known for play in one.plays}
    others = trajectories.filter(~pl.col("trajectory_id").is_in(played))
    skipped = [
        Skipped(
            window_id=window_id,
            scenario_id=scenario_id,
            reason=f"scenario {scenario_id} of {window_id} is not in the table {SCENARIOS}",
        )
        for window_id, scenario_id in others.select("window_id", "scenario_id")
        .unique()
        .sort("window_id", "scenario_id")
        .rows()
    ]
    skipped += [
        Skipped(
            window_id=one.window_id,
            scenario_id=one.scenario.scenario_id,
            reason=f"scenario {one.scenario.scenario_id} of {one.window_id}: its market was shared"
            f" with {', '.join(absent)}, whose replies are incomplete",
        )
        for one in known
        if one.plays and (absent := _absent(one))
    ]
    # Absent players cannot repeat the orders that moved the prices of their shared market.
    whole = tuple(one for one in known if one.plays and not _absent(one))
    return Rebuilt(whole, tuple(skipped))


def _absent(recorded: RecordedScenario) -> list[str]:
    there = {play.agent_id for play in recorded.plays if play.replies}
    return [name for name in recorded.players if name not in there]


def _root(place: Path) -> Path:
    for folder in (place, *place.parents)[:_DEEPEST]:
        if (folder / SCENARIOS).is_dir():
            return folder
    raise ReplayError(
        f"{place} has no folder {SCENARIOS} beside {TRAJECTORIES}: replay needs its outcomes and"
        " prices; `babylon dataset build` writes both"
    )


def _read(root: Path, table: str, prefix: str, only: Path | None) -> pl.DataFrame:
    files = [only] if only else sorted((root / table).rglob("*.parquet"))
    frames = []
    for file in files:
        try:
            rows = pl.scan_parquet(file, hive_partitioning=False).select(_COLUMNS[table])
            frame = rows.filter(pl.col("window_id").str.starts_with(prefix)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ReplayError(f"{file} is not a dataset's file: {error}") from error
        if frame.height:
            frames.append(frame)
    if not frames:
        raise ReplayError(
            f"{root / table} has no rows of {prefix or 'any window'}: there are {len(files)} files"
            f" ({', '.join(file.name for file in files[-3:]) or 'none'})"
        )
    return _newest(pl.concat(frames))


def _newest(frame: pl.DataFrame) -> pl.DataFrame:
    """Keep each row's newest copy: a window that was published twice has every row twice."""
    key = "trajectory_id" if "trajectory_id" in frame.columns else "knowledge_json"
    return frame.unique(["window_id", key], keep="last", maintain_order=True).sort("window_id", key)


def _scenario(row: ScenarioRow, plays: Mapping[str, RecordedPlay]) -> RecordedScenario:
    scenario = msgspec.json.decode(row["knowledge_json"], type=Scenario)
    by_tick = row["prices"] == "exact"  # a fleet's; agents of the live game answer at any time
    return RecordedScenario(
        window_id=row["window_id"],
        scenario=scenario,
        plays=tuple(
            _timed(plays[name], scenario.rules.ticks if by_tick else None)
            for name in row["trajectory_ids"]
            if name in plays
        ),
        players=tuple(row["players"]),
        prices=row["prices"],
        missing=tuple(row["missing"]),
    )


def _timed(play: RecordedPlay, ticks: int | None) -> RecordedPlay:
    """Drop the replies unless there is one per tick: the dataset's calls have no times."""
    return play if len(play.replies) == ticks else replace(play, replies=())


def _play(row: TrajectoryRow) -> RecordedPlay:
    """Return a row's play. The last reply of a step was carried out."""
    replies = {call["step"]: call["completion"][0]["content"] or "" for call in row["calls"]}
    return RecordedPlay(
        trajectory_id=row["trajectory_id"],
        agent_id=row["agent_id"],
        replies=tuple(replies[step] for step in sorted(replies)),
        pnl_usd=row["pnl_usd"],
    )
