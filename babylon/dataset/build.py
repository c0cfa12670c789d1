"""The files of finished windows: one for each table, the same bytes for the same rows."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from typing import Any

import msgspec
import pyarrow as pa

from babylon.core.errors import ArtifactError, BabylonError, reason_of
from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.core.types import Published, Scored
from babylon.core.windows import DONE
from babylon.dataset.outcomes import outcome_rows
from babylon.dataset.performance import performance_rows
from babylon.dataset.scenarios import scenario_rows
from babylon.dataset.schema import OUTCOMES, PERFORMANCE, SCENARIOS, TRAJECTORIES
from babylon.dataset.scores import read_scores
from babylon.dataset.scrub import cleaned, found, texts_of
from babylon.dataset.secret_rules import HEX_KEY
from babylon.dataset.table_file import TableName, write_table
from babylon.dataset.trajectories import Consent, Selection, trajectory_rows
from babylon.store import Store
from babylon.store.published import read_withheld, writing
from babylon.store.windows import list_windows

log = logging.getLogger(__name__)
Rows = list[dict[str, Any]]
_UNWRITABLE = (pa.ArrowException, OverflowError, msgspec.MsgspecError)
_IDS = ("_id", "_ids", "players")  # endings of columns that join the tables


async def windows_of(store: Store, day: date | None = None) -> list[Scored]:
    """Return the scored manifests of finished windows, of one UTC day or all, oldest first.

    A window counts once it is deployed or rejected, because its rows do not change any more.
    """
    rows = sorted(await list_windows(store), key=lambda row: row.window_id)
    return [
        row.scored
        for row in rows
        if row.state in DONE
        and row.scored
        and (day is None or row.window_id.startswith(day.isoformat()))
    ]


async def selection_of(store: Store, publish: PublishSettings) -> Selection:
    """Return the rows that may leave this machine: consented, and not taken down."""
    patterns = publish.agents
    return Selection(
        withheld=await read_withheld(store),
        agents=Consent(tuple(one.strip() for one in patterns.split(","))) if patterns else None,
    )


async def build_tables(
    store: Store, home: Home, scored: Scored, selection: Selection
) -> dict[str, Published]:
    """Write a window's file of each table → table and file.

    What was taken down since ``selection`` was made is left out too.

    Raises:
        ArtifactError: the window's scored rows are gone, or hold what no table can.
    """
    async with writing(store) as withheld:
        try:
            return await _build(store, home, scored, replace(selection, withheld=withheld))
        except _UNWRITABLE as error:  # its own message may hold the value
            raise ArtifactError(
                f"the rows of window {scored.claim.window_id} fit no table ({reason_of(error)}):"
                " correct the game's rows and run the window again, or publish without it"
            ) from error


async def _build(
    store: Store, home: Home, scored: Scored, selection: Selection
) -> dict[str, Published]:
    window_id = scored.claim.window_id
    scores = await read_scores(store, window_id)
    measured = await performance_rows(store, home, scored, selection)
    tables: dict[str, Callable[[], Iterable[Rows]]] = {
        TRAJECTORIES: lambda: trajectory_rows(home, scored, scores, selection),
        SCENARIOS: lambda: [_safe(SCENARIOS, scenario_rows(home, scored, selection), selection)],
        OUTCOMES: lambda: (_safe(OUTCOMES, rows, selection) for rows in outcome_rows(home, scored)),
        PERFORMANCE: lambda: [_safe(PERFORMANCE, measured, selection)],
    }

    def write(config: str, rows: Callable[[], Iterable[Rows]]) -> Published:
        return write_table(home, TableName(config, window_id), rows())

    return {config: await asyncio.to_thread(write, config, rows) for config, rows in tables.items()}


async def build_windows(
    store: Store, home: Home, selection: Selection, day: date | None = None
) -> tuple[list[Published], list[str]]:
    """Write every finished window, of one UTC day or all → files, and the windows that failed."""
    written: list[Published] = []
    problems: list[str] = []
    for scored in await windows_of(store, day):
        try:
            written += (await build_tables(store, home, scored, selection)).values()
        except BabylonError as error:  # a damaged window must not hold up all later ones
            problems.append(f"window {scored.claim.window_id} was not written: {error}")
    return written, problems


def _safe(config: str, rows: Rows, selection: Selection) -> Rows:
    """Return the rows without secrets. A row in which one is left costs only itself."""
    if not selection.safe:
        return rows
    safe = []
    for row in rows:
        ids = {name: own for name, own in row.items() if name.endswith(_IDS) and _plain(own)}
        clean = cleaned({name: own for name, own in row.items() if name not in ids})
        if left := found(texts_of(clean)):
            log.error(
                "a row of %s of window %s is not published: rule %s still matches after scrubbing",
                config,
                row["window_id"],
                ", ".join(sorted(left)),
            )
        else:
            safe.append(clean | ids)
    return safe


def _plain(ids: Any) -> bool:
    """True for ids that hold no secret. A key in hex looks as ids do, and they join the tables."""
    return found(texts_of(ids)) <= {HEX_KEY}
