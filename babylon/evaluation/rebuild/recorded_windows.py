"""Scenarios of the windows recorded in Postgres."""

from collections.abc import Iterable, Sequence
from itertools import compress, groupby
from math import isfinite
from typing import cast

from babylon.core.errors import ReplayError
from babylon.core.windows import Window
from babylon.evaluation.rebuild.rebuild_fleet import rebuild_fleet, skipped_for
from babylon.evaluation.rebuild.rebuild_live import rebuild_live
from babylon.evaluation.rebuild.recorded import (
    MarketOutcome,
    Rebuilt,
    RecordedRow,
    RecordedScenario,
    RecordedStep,
    Skipped,
)
from babylon.quality.decode import GameMetadata, Reason, RejectedError, decode
from babylon.store.connection import Store, require_game_tables
from babylon.store.session import in_batches

_AT_A_TIME = 100
_TIME = "%Y-%m-%d %H:%M"

_WINDOWS = """
    SELECT DISTINCT "windowId" FROM trajectories
    WHERE starts_with("windowId", $1) ORDER BY "windowId"
"""
_SCENARIO = 'coalesce("scenarioId", "windowId", $1::text)'
_SELECT = f"""
    SELECT "trajectoryId" AS trajectory_id, "agentId" AS agent_id,
        coalesce("windowId", $1::text) AS window_id,
        {_SCENARIO} AS scenario_id,
        "finalPnL"::float8 AS final_pnl_usd, "stepsJson"::text AS steps_json,
        "metadataJson"::text AS metadata_json
    FROM trajectories
"""
_ORDER = f'ORDER BY {_SCENARIO} COLLATE "C", "trajectoryId" COLLATE "C"'
_ROWS = f'{_SELECT} WHERE "windowId" = $1 {_ORDER}'
_PLAYED = f"""{_SELECT}
    WHERE "startTime" >= $2::timestamptz AT TIME ZONE 'UTC'
      AND "startTime" < $3::timestamptz AT TIME ZONE 'UTC'
      AND NOT "startTime" <@ $4::text::tsmultirange
    {_ORDER} LIMIT $5
"""
_OUTCOMES = """
    SELECT "stockTicker", "startPrice"::float8, "endPrice"::float8, "predictionMarketId", outcome
    FROM market_outcomes WHERE "windowId" = $1 ORDER BY id COLLATE "C"
"""


async def recorded_windows(store: Store, prefix: str) -> list[str]:
    """Return the ids that begin with ``prefix`` (a month, a day, a whole id, or ``""`` for all),
    oldest first.

    Raises:
        ReplayError: No trajectory was recorded in those windows.
    """
    require_game_tables(store)
    ids = [row["windowId"] for row in await store.game.fetch(_WINDOWS, prefix)]
    if not ids:
        raise ReplayError(
            f"no trajectory was recorded in {prefix or 'any window'}: see `babylon windows list`,"
            " or replay a dataset with --from"
        )
    return ids


async def rebuild_windows(
    store: Store, window_ids: Sequence[str], *, interpolate: bool = False
) -> Rebuilt:
    """Rebuild every scenario of the windows."""
    scenarios: list[RecordedScenario] = []
    skipped: list[Skipped] = []
    for window_id in window_ids:
        rows = await recorded_rows(store, window_id)
        one = rebuild_rows(rows, interpolate=interpolate)
        scenarios += one.scenarios
        skipped += one.skipped
    return Rebuilt(tuple(scenarios), tuple(skipped))


def rebuild_rows(rows: Sequence[RecordedRow | Skipped], *, interpolate: bool = False) -> Rebuilt:
    """Rebuild every scenario of the rows.

    Rows with a ``market`` in their first step are a fleet's; all others are the live game's.
    """
    scenarios: list[RecordedScenario] = []
    skipped = [row for row in rows if isinstance(row, Skipped)]
    for group in _by_scenario([row for row in rows if isinstance(row, RecordedRow)]):
        by_fleet = [row.steps[0].environment_state.market is not None for row in group]
        found = rebuild_fleet([*compress(group, by_fleet)])
        scenarios += found.scenarios
        skipped += found.skipped
        if live := [row for row, fleet in zip(group, by_fleet, strict=True) if not fleet]:
            try:
                scenarios.append(rebuild_live(live, interpolate=interpolate))
            except Exception as error:  # whatever a scenario's rows hold must not cost the others
                skipped.append(skipped_for(live[0], error))
    return Rebuilt(tuple(scenarios), tuple(skipped))


async def recorded_rows(store: Store, window_id: str) -> list[RecordedRow | Skipped]:
    """Return the rows of a window id, trained or not, with the window's outcomes."""
    fetched = await store.game.fetch(_OUTCOMES, window_id)
    outcomes = tuple(cast(MarketOutcome, dict(row)) for row in fetched)
    return await _rows(store, outcomes, _ROWS, window_id)


async def played_rows(
    store: Store, window: Window, *, apart_from: Iterable[Window], most: int
) -> list[RecordedRow | Skipped]:
    """Return at most ``most`` rows that started in the window, whatever id they carry, by scenario.

    Rows that started in a window of ``apart_from`` are left out. The rows have no outcomes. Those
    without an id get that of the window.
    """
    times = (f'["{one.start:{_TIME}}","{one.end:{_TIME}}")' for one in apart_from)
    apart = f"{{{','.join(times)}}}"
    return await _rows(store, (), _PLAYED, window.id, window.start, window.end, apart, most)


async def _rows(
    store: Store, outcomes: tuple[MarketOutcome, ...], query: str, *arguments: object
) -> list[RecordedRow | Skipped]:
    found: list[RecordedRow | Skipped] = []
    async with store.game.acquire() as connection, connection.transaction(readonly=True):
        async for rows in in_batches(connection, query, *arguments, size=_AT_A_TIME):
            found += [recorded_row(outcomes, **row) for row in rows]
    return found


Steps = tuple[RecordedStep, ...]


def recorded_row(
    outcomes: tuple[MarketOutcome, ...],
    *,
    trajectory_id: str,
    agent_id: str,
    window_id: str,
    scenario_id: str,
    final_pnl_usd: float | None,
    steps_json: str,
    metadata_json: str,
) -> RecordedRow | Skipped:
    """Decode a row; ``Skipped`` if it cannot be decoded.

    The P&L inside the window is the last known lifetime P&L minus the first step's.
    """
    try:
        steps = decode(steps_json, Steps, "stepsJson")
        knowledge = decode(metadata_json, GameMetadata, "metadataJson").game_knowledge
        if not steps:
            raise RejectedError(Reason.EMPTY_STEPS, "stepsJson is []")
        pnl_usd = _pnl_usd(steps, final_pnl_usd)
    # A row costs only itself: the window's other rows are replayed.
    except RejectedError as error:
        reason = f"trajectory {trajectory_id}: {error}"
        return Skipped(window_id=window_id, scenario_id=scenario_id, reason=reason)
    return RecordedRow(
        trajectory_id=trajectory_id,
        agent_id=agent_id,
        window_id=window_id,
        scenario_id=scenario_id,
        pnl_usd=pnl_usd,
        steps=steps,
        knowledge=knowledge,
        outcomes=outcomes,
    )


def _pnl_usd(steps: Steps, final_pnl_usd: float | None) -> float:
    last = steps[-1].environment_state.agent_pnl if final_pnl_usd is None else final_pnl_usd
    pnl = last - steps[0].environment_state.agent_pnl
    if not isfinite(pnl):
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"finalPnL {last!r}: P&L is {pnl!r}")
    return pnl


def _by_scenario(rows: Sequence[RecordedRow]) -> list[list[RecordedRow]]:
    ordered = sorted(rows, key=lambda r: (r.window_id, r.scenario_id, r.trajectory_id))
    return [list(group) for _, group in groupby(ordered, lambda r: (r.window_id, r.scenario_id))]
