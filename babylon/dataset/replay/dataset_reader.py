"""Scenarios and replies out of a dataset: its tables ``scenarios`` and ``trajectories``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from babylon.core.errors import ReplayError
from babylon.core.trajectories import Call
from babylon.dataset.replay.recorded import Rebuilt, RecordedPlay, RecordedScenario, Skipped
from babylon.game.market.scenario import Scenario

SCENARIOS, TRAJECTORIES = "scenarios", "trajectories"
_COLUMNS = {
    SCENARIOS: ("window_id", "players", "prices", "missing", "trajectory_ids", "knowledge_json"),
    TRAJECTORIES: (
        "trajectory_id",
        "agent_id",
        "window_id",
        "scenario_id",
        "pnl_usd",
        "calls_json",
    ),
}
_DEEPEST = 4  # <dataset>/<table>/month=<month>/<file>


def read_dataset(place: Path, prefix: str) -> Rebuilt:
    """The scenarios of the windows whose id begins with ``prefix``. ``place`` is a dataset's folder
    (or one above its tables), or a ``trajectories`` file inside one.

    Raises:
        ReplayError: there is no such folder, or it lacks one of the two tables or the time.
    """
    if not place.exists():
        raise ReplayError(f"{place} is not there: give a dataset's folder, or one of its files")
    root = _root(place)
    only = place if place.is_file() and place.parent.parent.name == TRAJECTORIES else None
    trajectories = _read(root, TRAJECTORIES, prefix, only)
    plays = {row["trajectory_id"]: _play(row) for row in trajectories.iter_rows(named=True)}
    known = [
        _scenario(row, plays) for row in _read(root, SCENARIOS, prefix, None).iter_rows(named=True)
    ]
    played = {play.trajectory_id for one in known for play in one.plays}
    others = trajectories.filter(~pl.col("trajectory_id").is_in(played))
    skipped = [
        Skipped(
            window_id=window_id,
            scenario_id=scenario_id,
            reason=f"scenario {scenario_id} of {window_id} is not among the dataset's scenarios",
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
            reason=f"scenario {one.scenario.scenario_id} of {one.window_id}: of"
            f" {', '.join(absent)}, who played in the same market, there are no replies for all"
            " ticks",
        )
        for one in known
        if one.plays and (absent := _absent(one))
    ]
    whole = tuple(one for one in known if one.plays and not _absent(one))
    return Rebuilt(whole, tuple(skipped))


def _absent(recorded: RecordedScenario) -> list[str]:
    """Who shared the market, and cannot do again what it did."""
    there = {play.agent_id for play in recorded.plays if play.replies}
    return [name for name in recorded.players if name not in there]


def _root(place: Path) -> Path:
    """The folder that holds the tables' folders."""
    for folder in (place, *place.parents)[:_DEEPEST]:
        if (folder / SCENARIOS).is_dir():
            return folder
    raise ReplayError(
        f"{place} has no folder {SCENARIOS} beside {TRAJECTORIES}: it holds outcomes and prices,"
        " without which nothing can be replayed; `babylon dataset build` writes both"
    )


def _read(root: Path, table: str, prefix: str, only: Path | None) -> pl.DataFrame:
    files = [only] if only else sorted((root / table).rglob("*.parquet"))
    frames = []
    for file in files:
        try:
            rows = pl.scan_parquet(file, hive_partitioning=False).select(_COLUMNS[table])
            frame = rows.filter(pl.col("window_id").str.starts_with(prefix)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ReplayError(f"{file} is no file of a dataset: {error}") from error
        if frame.height:
            frames.append(frame)
    if not frames:
        raise ReplayError(
            f"{root / table} has nothing of {prefix}: there are {len(files)} files"
            f" ({', '.join(file.name for file in files[-3:]) or 'none'})"
        )
    return _newest(pl.concat(frames))


def _newest(frame: pl.DataFrame) -> pl.DataFrame:
    """A window that was published twice says everything twice."""
    key = "trajectory_id" if "trajectory_id" in frame.columns else "knowledge_json"
    return frame.unique(["window_id", key], keep="last", maintain_order=True).sort("window_id", key)


def _scenario(row: dict[str, Any], plays: Mapping[str, RecordedPlay]) -> RecordedScenario:
    scenario = msgspec.json.decode(row["knowledge_json"], type=Scenario)
    by_tick = row["prices"] == "exact" or bool(scenario.questions)  # else of the live game
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
    """Without its replies, unless there is one a tick: a trajectory's calls have steps and no time,
    and agents of the live game answer when they like."""
    return play if len(play.replies) == ticks else replace(play, replies=())


def _play(row: dict[str, Any]) -> RecordedPlay:
    """The last reply of each step is the one that was acted on."""
    calls = msgspec.json.decode(row["calls_json"], type=tuple[Call, ...])
    replies = {call.step: call.response for call in calls}
    return RecordedPlay(
        trajectory_id=row["trajectory_id"],
        agent_id=row["agent_id"],
        replies=tuple(replies[step] for step in sorted(replies)),
        pnl_usd=row["pnl_usd"],
    )
