from dataclasses import replace
from datetime import UTC, datetime

import pytest

from babylon.errors import DatabaseError
from babylon.market.fleet import FleetPlan
from babylon.market.spawn import run_fleet
from babylon.settings import Settings
from babylon.store import Store

PLAN = FleetPlan(start=datetime(2025, 11, 14, 9, tzinfo=UTC), duration_min=6, agents=4)
COUNT = "SELECT count(*) FROM trajectories"


async def test_a_scripted_fleet_leaves_trajectories_calls_and_outcomes(
    store: Store, settings: Settings
) -> None:
    result = await run_fleet(store, settings, PLAN, "scripted")
    assert (result.trajectories, result.calls, result.windows) == (4, 24, ("2025-11-14T09:00",))
    assert await store.pool.fetchval(COUNT) == 4
    assert await store.pool.fetchval("SELECT count(*) FROM llm_call_logs") == 24
    assert await store.pool.fetchval("SELECT count(*) FROM market_outcomes") == 3


async def test_simulated_play_is_not_written_into_a_live_game(
    store: Store, settings: Settings
) -> None:
    with pytest.raises(DatabaseError, match="unset DATABASE_URL"):
        await run_fleet(replace(store, game_tables_ours=False), settings, PLAN, "scripted")
    assert await store.pool.fetchval(COUNT) == 0
