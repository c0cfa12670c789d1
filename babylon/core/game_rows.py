"""Rows of the game's ``trajectories`` as Babylon reads them, and the condition for training rows.

The game's column names are camelCase and therefore quoted. Its times are UTC without a zone.
Postgres accepts infinity and years that Python's calendar lacks; such times are read as NULL.

A row belongs to the window in which it started, whatever the length of windows. Its own window id
is only checked (``babylon.core.windows.id_problem``).
"""

from dataclasses import dataclass, fields
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, get_args, get_type_hints

import msgspec
import polars as pl

from babylon.core.windows import FIRST_YEAR, LAST_YEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class GameRow:
    """One trajectory as the game wrote it, with the rows joined to it. Nothing is checked yet.

    An annotated field is read from the game's column of that name. ``logs_json`` maps the ids of
    ``llm_call_logs`` to ``[response, messages, top_p]``, ``messages`` as JSON text.
    ``gateway_json`` lists ``store.calls.RecordedCall`` in the order of time; it is ``null`` if they
    are too large. ``outcomes_json`` holds the window's market outcomes, which are ground truth.
    """

    trajectory_id: Annotated[str, "trajectoryId"]
    agent_id: Annotated[str, "agentId"]
    window_id: Annotated[str | None, "windowId"]
    window_hours: Annotated[int | None, "windowHours"] = 1
    scenario_id: Annotated[str | None, "scenarioId"]
    start: Annotated[datetime | None, "startTime"]
    end: Annotated[datetime | None, "endTime"]
    total_reward: Annotated[float, "totalReward"]
    final_pnl_usd: Annotated[float | None, "finalPnL"]
    steps_json: Annotated[str, "stepsJson"]
    metrics_json: Annotated[str, "metricsJson"]
    metadata_json: Annotated[str, "metadataJson"]
    reward_components_json: Annotated[str, "rewardComponentsJson"]
    logs_json: str = "{}"
    gateway_json: str = "[]"
    outcomes_json: str = "[]"


class _Game(msgspec.Struct):
    players: tuple[str, ...] = ()


class _Market(msgspec.Struct):
    """The part of a simulated market's state that says who played in it."""

    game: _Game = msgspec.field(default_factory=_Game)


def players_of(market: msgspec.Raw) -> list[str]:
    """Return the agents that shared the market of a play's first step.

    There are none if it was the agent's own, or if the game does not tell.
    """
    try:
        players = msgspec.json.decode(market, type=_Market).game.players
    except msgspec.ValidationError:  # a state is the game's own
        return []
    return list(players) if len(players) > 1 else []


def scenario_market(scenario_id: str, market_id: str) -> str:
    """Return a question's unique name in its window: every scenario has a market ``m1``."""
    return f"{scenario_id}:{market_id}"


def scenario_ticker(scenario_id: str, ticker: str) -> str:
    """Return a perpetual's unique name in its window.

    Other scenarios of the window have the same ticker at other prices. The game's column holds 20
    characters, so the scenario is a digest.
    """
    return f"{ticker}:{blake2b(scenario_id.encode(), digest_size=4).hexdigest()}"


_TYPES = get_type_hints(GameRow)
_GAME_COLUMNS = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(GameRow, include_extras=True).items()
    if hint is not _TYPES[name]
}


def _polars_type(hint: object) -> pl.DataType:
    kinds: dict[type, pl.DataType] = {
        str: pl.String(),
        int: pl.Int64(),
        float: pl.Float64(),
        datetime: pl.Datetime("us", "UTC"),
    }
    return next(dtype for kind, dtype in kinds.items() if hint in (kind, kind | None))


# The game's Prisma schema says text, another one may say jsonb, and numeric for a number.
_CASTS: dict[object, str] = {
    kind: cast
    for plain, cast in ((str, "::text"), (float, "::float8"), (int, "::int8"))
    for kind in (plain, plain | None)
}


def _sql(name: str, column: str) -> str:
    value = f't."{column}"{_CASTS.get(_TYPES[name], "")}'
    if isinstance(GAME_SCHEMA[name], pl.Datetime):
        bounds = f"'{FIRST_YEAR}-01-01' AND '{LAST_YEAR}-12-31'"
        value = f"CASE WHEN {value} BETWEEN {bounds} THEN {value} AT TIME ZONE 'UTC' END"
    return f'{value} AS "{name}"'


GAME_SCHEMA = pl.Schema([(one.name, _polars_type(_TYPES[one.name])) for one in fields(GameRow)])
COLUMNS = ",\n    ".join(_sql(name, column) for name, column in _GAME_COLUMNS.items())
"""The select list that reads a ``GameRow``, without the joined fields, from ``trajectories t``."""

FOR_TRAINING = 't."isTrainingData" AND NOT t."isEvaluation" AND NOT t."usedInTraining"'
"""The game's own condition for training rows."""

UNTRAINED = f"""
    {FOR_TRAINING}
    AND NOT EXISTS (
        SELECT FROM babylon.trained d WHERE d.trajectory_id = t."trajectoryId"
    )
    AND NOT EXISTS (
        SELECT FROM babylon.late l WHERE l.trajectory_id = t."trajectoryId" AND admitted_to IS NULL
    )
"""
