"""Recorded windows in Postgres as scenarios."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from babylon.core.errors import ReplayError
from babylon.dataset.replay.from_prompts import rebuild_from_prompts, tells_prices
from babylon.dataset.replay.live import rebuild_live
from babylon.dataset.replay.rebuild import by_scenario, is_observed, rebuild
from babylon.dataset.replay.recorded import (
    Rebuilt,
    RecordedRow,
    RecordedScenario,
    RecordedStep,
    Skipped,
)
from babylon.quality.decode import GameMetadata, decode
from babylon.quality.reasons import Reason, RejectedError
from babylon.store.connection import Store, require_game_tables

_WINDOWS = """
    SELECT DISTINCT "windowId" FROM trajectories
    WHERE starts_with("windowId", $1) ORDER BY "windowId"
"""
_ROWS = """
    SELECT "trajectoryId" AS trajectory_id, "agentId" AS agent_id, "windowId" AS window_id,
        coalesce("scenarioId", "windowId") AS scenario_id,
        "startTime" AT TIME ZONE 'UTC' AS start, "finalPnL" AS final_pnl_usd,
        "stepsJson" AS steps, "metadataJson" AS metadata
    FROM trajectories WHERE "windowId" = $1 ORDER BY "trajectoryId" COLLATE "C"
"""
_OUTCOMES = """
    SELECT "stockTicker", "startPrice"::float8, "endPrice"::float8, "predictionMarketId", question,
        outcome, "finalProbability"::float8
    FROM market_outcomes WHERE "windowId" = $1 ORDER BY id COLLATE "C"
"""


async def recorded_windows(store: Store, prefix: str) -> list[str]:
    """Ids of the windows that begin with ``prefix`` (a month, a day, or a whole id), oldest first.

    Raises:
        ReplayError: nothing was recorded then.
    """
    require_game_tables(store)
    ids = [row["windowId"] for row in await store.pool.fetch(_WINDOWS, prefix)]
    if not ids:
        raise ReplayError(
            f"no trajectory was recorded in {prefix}: see `babylon windows list`, or replay a"
            " dataset with --from"
        )
    return ids


async def rebuild_windows(
    store: Store, window_ids: Sequence[str], *, interpolate: bool = False
) -> Rebuilt:
    """Every scenario of the windows, and those that cannot be replayed with the reason."""
    scenarios: list[RecordedScenario] = []
    skipped: list[Skipped] = []
    for window_id in window_ids:
        rows = await recorded_rows(store, window_id)
        one = rebuild_rows(rows, interpolate=interpolate)
        scenarios += one.scenarios
        skipped += one.skipped
    return Rebuilt(tuple(scenarios), tuple(skipped))


def rebuild_rows(rows: Sequence[RecordedRow | Skipped], *, interpolate: bool = False) -> Rebuilt:
    """The same of rows at hand."""
    scenarios: list[RecordedScenario] = []
    skipped = [row for row in rows if isinstance(row, Skipped)]
    for group in by_scenario([row for row in rows if isinstance(row, RecordedRow)]):
        try:
            if is_observed(group[0]):
                found = rebuild(group)
                scenarios += found.scenarios
                skipped += found.skipped
            elif tells_prices(group[0]):
                scenarios.append(rebuild_from_prompts(group))
            else:
                scenarios.append(rebuild_live(group, interpolate=interpolate))
        except ReplayError as error:
            first = group[0]
            skipped.append(
                Skipped(window_id=first.window_id, scenario_id=first.scenario_id, reason=str(error))
            )
    return Rebuilt(tuple(scenarios), tuple(skipped))


async def recorded_rows(store: Store, window_id: str) -> list[RecordedRow | Skipped]:
    """The window's rows, whether they were trained or not."""
    outcomes = tuple(dict(row) for row in await store.pool.fetch(_OUTCOMES, window_id))
    rows = []
    async with store.pool.acquire() as connection, connection.transaction(readonly=True):
        async for row in connection.cursor(_ROWS, window_id):
            texts = (row["steps"], row["metadata"])
            plain = {name: row[name] for name in _PLAIN}
            rows.append(recorded_row(plain, *texts, outcomes, row["final_pnl_usd"]))
    return rows


_PLAIN = ("trajectory_id", "agent_id", "window_id", "scenario_id", "start")
Steps = tuple[RecordedStep, ...]


def recorded_row(
    plain: dict[str, Any],
    steps_json: str,
    metadata_json: str,
    outcomes: tuple[dict[str, Any], ...],
    final_pnl_usd: float | None,
) -> RecordedRow | Skipped:
    """A row as a record, or why it is none. P&L inside the window is the last known lifetime P&L
    minus the first step's."""
    try:
        steps = decode(steps_json, Steps, "stepsJson")
        knowledge = decode(metadata_json, GameMetadata, "metadataJson").game_knowledge
        if not steps:
            raise RejectedError(Reason.EMPTY_STEPS, "stepsJson is []")
        pnl_usd = _pnl_usd(steps, final_pnl_usd)
    except RejectedError as error:
        reason = f"trajectory {plain['trajectory_id']}: {error}"
        return Skipped(
            window_id=plain["window_id"], scenario_id=plain["scenario_id"], reason=reason
        )
    return RecordedRow(
        **plain, pnl_usd=pnl_usd, steps=steps, knowledge=knowledge, outcomes=outcomes
    )


def _pnl_usd(steps: Steps, final_pnl_usd: float | None) -> float:
    last = steps[-1].environment_state.agent_pnl if final_pnl_usd is None else final_pnl_usd
    pnl = last - steps[0].environment_state.agent_pnl
    if not isfinite(pnl):
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"finalPnL {last!r}: P&L is {pnl!r}")
    return pnl
