"""The table ``scenarios``: the played scenarios, for replay.

``knowledge_json`` is the whole scenario with outcomes and future prices. It is the only column with
ground truth. Each window has one immutable file. Scenarios that cannot be rebuilt are left out.
"""

import logging
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import msgspec

from babylon.core.artifacts import iter_artifact
from babylon.core.home import Home
from babylon.core.types import Scored
from babylon.dataset.trajectories import Selection
from babylon.evaluation.rebuild.recorded import (
    RecordedPlay,
    RecordedRow,
    RecordedScenario,
    RecordedStep,
    Skipped,
)
from babylon.evaluation.rebuild.recorded_windows import rebuild_rows
from babylon.quality.decode import RejectedError, decode

log = logging.getLogger(__name__)

_COLUMNS = (
    "trajectory_id",
    "agent_id",
    "window_id",
    "scenario_id",
    "pnl_usd",
    "game_json",
    "knowledge_json",
)


def scenario_rows(home: Home, scored: Scored, selection: Selection) -> list[dict[str, Any]]:
    """Return the scenarios that can be rebuilt from the rows; one line is logged of the others.

    One without a play that is published is left out.
    """
    rebuilt = rebuild_rows([row for row in _rows(home, scored) if _is_read(row, selection)])
    if rebuilt.skipped:  # of a game that is not ours this is every row
        log.warning(
            "window %s: %d rows or scenarios cannot be replayed, the first because: %s",
            scored.claim.window_id,
            len(rebuilt.skipped),
            rebuilt.skipped[0].reason,
        )
    return [
        _row(scored.claim.window_id, one, plays)
        for one in rebuilt.scenarios
        if (plays := _plays(one, selection))
    ]


def _is_read(row: RecordedRow | Skipped, selection: Selection) -> bool:
    """Return False for a row that is not published and from which a scenario would tell.

    A live scenario has its agents' own balance, minutes and prices. That of a fleet is the game's,
    and which crowd it had is decided by most rows: those of absent agents count too.
    """
    return (
        isinstance(row, Skipped)
        or row.steps[0].environment_state.market is not None
        or selection.takes(row.agent_id, row.trajectory_id)
    )


def _plays(recorded: RecordedScenario, selection: Selection) -> list[RecordedPlay]:
    """Return the plays that are published. A shared market cannot be played without one of them."""
    plays = [play for play in recorded.plays if selection.takes(play.agent_id, play.trajectory_id)]
    return [] if recorded.players and len(plays) < len(recorded.plays) else plays


def _rows(home: Home, scored: Scored) -> Iterable[RecordedRow | Skipped]:
    for frame in iter_artifact(home, scored.artifact, _COLUMNS):
        for row in frame.iter_rows(named=True):
            try:
                steps = decode(row.pop("game_json"), tuple[RecordedStep, ...], "stepsJson")
            # A state is the game's own: it may lack what a replay needs, such as the balance.
            except RejectedError as error:
                yield Skipped(
                    window_id=row["window_id"],
                    scenario_id=row["scenario_id"],
                    reason=f"trajectory {row['trajectory_id']}: {error}",
                )
                continue
            knowledge = msgspec.json.decode(row.pop("knowledge_json"))
            yield RecordedRow(
                **row,
                steps=steps,
                knowledge=knowledge["game_knowledge"],
                outcomes=tuple(knowledge["market_outcomes"]),
            )


def _row(window_id: str, recorded: RecordedScenario, plays: list[RecordedPlay]) -> dict[str, Any]:
    scenario = recorded.scenario
    pnl = [play.pnl_usd for play in plays]
    return {
        "scenario_id": scenario.scenario_id,
        "window_id": window_id,
        "ticks": scenario.rules.ticks,
        "markets": len(scenario.questions),
        "perps": len(scenario.perps),
        "prices": recorded.prices,
        "missing": list(recorded.missing),
        "players": list(recorded.players),
        "questions": [question.text for question in scenario.questions],
        "trajectory_ids": [play.trajectory_id for play in plays],
        "agents": len({play.agent_id for play in plays}),
        "mean_pnl_usd": fmean(pnl),
        "best_pnl_usd": max(pnl),
        "knowledge_json": msgspec.json.encode(scenario, order="deterministic").decode(),
    }
