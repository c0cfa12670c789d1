"""The state of training in a few numbers, for monitoring: no row of play is decoded."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from babylon.core.windows import DONE, FINISHED, WindowState
from babylon.store.connection import UNREACHABLE, Store, one_line
from babylon.store.gateways import live_gateways
from babylon.store.judgments import spent_today
from babylon.store.window_health import WindowHealth, newest_health
from babylon.store.windows import lost_windows

GAME_S = 5.0  # a scrape of Prometheus waits ten seconds for all figures together
log = logging.getLogger(__name__)
_NEWEST_PLAY = """
SELECT max("startTime") FROM trajectories WHERE "startTime" < now() AT TIME ZONE 'UTC'
"""
_STATES = "SELECT state, count(*), count(*) FILTER (WHERE lease_until > now()) FROM babylon.windows"
_LAST = """
SELECT updated_at, metrics FROM babylon.windows
WHERE state = ANY($1) AND position('+' IN window_id) = 0 ORDER BY window_id DESC LIMIT 1
"""
_PUBLISHED = "SELECT max(published_at) FROM babylon.published WHERE revision <> ''"
_WITHOUT_TRUTH = """
SELECT count(*) FROM babylon.windows
WHERE state = ANY($1) AND position('+' IN window_id) = 0 AND metrics ->> 'market_outcomes' = '0'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """Windows by state, the newest play, and the newest finished window.

    ``leased`` windows are in work, ``lost`` ones were when their worker died. ``quarantined``
    gateways run, and no change of the route waits for them. ``without_truth`` windows were judged
    without market outcomes. ``judge_usd``: the judge's cost of this UTC day. ``published_at``: when
    a window was last entered in the ledger of the dataset. ``metrics`` are the numbers among the
    metrics of the newest finished window. ``health`` is that of the newest window that was
    validated.
    """

    windows: Mapping[str, int]
    leased: int
    lost: int
    quarantined: int
    without_truth: int
    judge_usd: float
    newest_play: datetime | None
    finished_at: datetime | None
    published_at: datetime | None
    metrics: Mapping[str, float]
    health: WindowHealth | None


async def newest_play(store: Store) -> datetime | None:
    """Return the start of the newest trajectory, ``None`` if none can be read.

    None too while ``GAME_DATABASE_URL`` does not answer, so that all other figures are reported.
    """
    if store.game_problem:
        return None
    apart = store.game is not store.pool
    try:
        async with asyncio.timeout(GAME_S if apart else None):
            newest: datetime | None = await store.game.fetchval(_NEWEST_PLAY)
    except UNREACHABLE as error:
        if not apart:
            raise
        log.warning("the newest play is not read: %s", one_line(error) or type(error).__name__)
        return None
    return newest and newest.replace(tzinfo=UTC)


async def read_flow_state(store: Store) -> FlowState:
    """Read the state in nine short queries."""
    states = await store.pool.fetch(f"{_STATES} GROUP BY state")
    last = await store.pool.fetchrow(_LAST, [str(state) for state in DONE])
    scored = [str(state) for state in {*FINISHED, WindowState.SCORED}]
    return FlowState(
        windows={state: count for state, count, _ in states},
        leased=sum(leased for *_, leased in states),
        lost=len(await lost_windows(store)),
        quarantined=sum(one.quarantined is not None for one in await live_gateways(store)),
        judge_usd=(await spent_today(store)).usd,
        without_truth=await store.pool.fetchval(_WITHOUT_TRUTH, scored),
        newest_play=await newest_play(store),
        finished_at=last["updated_at"] if last else None,
        published_at=await store.pool.fetchval(_PUBLISHED),
        metrics={
            name: float(value)
            for name, value in (last["metrics"] if last else {}).items()
            if isinstance(value, bool | int | float)
        },
        health=await newest_health(store),
    )
