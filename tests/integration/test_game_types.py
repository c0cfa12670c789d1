"""A game whose JSON columns are jsonb and whose numbers are numeric or integers."""

import pytest

from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.formats.export_files import read_window_traces
from babylon.ops.pages.trajectory import read_trajectory
from babylon.stages.collect import collect_window
from babylon.stages.validate import validate_window
from babylon.store import Store
from tests.conftest import real_rows
from tests.integration.experiments import world
from tests.integration.game import WINDOW, claim, insert_real_window
from tests.integration.test_experiment import look, pnl

OTHER_TYPES = "; ".join(
    f'ALTER TABLE {table} ALTER "{column}" TYPE {kind} USING "{column}"::{kind}'
    for table, columns, kind in (
        ("trajectories", "stepsJson metricsJson metadataJson rewardComponentsJson", "jsonb"),
        ("trajectories", "totalReward finalPnL finalBalance windowHours", "numeric"),
        ("llm_call_logs", "messagesJson", "jsonb"),
        ("llm_call_logs", "topP", "numeric"),
        ("market_outcomes", "startPrice endPrice", "integer"),
    )
    for column in columns.split()
)


async def test_a_window_of_other_types_is_collected(store: Store, settings: Settings) -> None:
    await insert_real_window(store)
    await store.pool.execute('UPDATE llm_call_logs SET "topP" = 0.9')
    await store.pool.execute(OTHER_TYPES)
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    assert collected.outcomes == len(real_rows("market_outcomes"))
    validated = await validate_window(store, settings, collected)
    assert (validated.agents, validated.rejected) == (5, {"no_llm_call": 10})
    calls = [c for one in read_trajectories(settings.home, validated.artifact) for c in one.calls]
    assert {call.top_p for call in calls} == {0.9}


async def test_play_of_other_types_is_compared_in_an_experiment(
    store: Store, settings: Settings
) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=200)
    await fleet.write()
    before = await look(store, settings)
    await store.pool.execute(OTHER_TYPES)
    after = await look(store, settings)
    assert (after.decision, after.plays) == ("promote", 180)
    assert pnl(after).difference == pytest.approx(pnl(before).difference)


async def test_traces_of_other_types_are_exported_and_shown(store: Store) -> None:
    await insert_real_window(store)
    before = [trace async for trace in read_window_traces(store, WINDOW)]
    await store.pool.execute(OTHER_TYPES)
    after = [trace async for trace in read_window_traces(store, WINDOW)]
    assert [trace.steps for trace in after] == [trace.steps for trace in before]
    results = [[trace.final_pnl for trace in traces] for traces in (after, before)]
    assert results[0] == pytest.approx(results[1])
    shown = await read_trajectory(store, before[0].trajectory_id)
    assert shown is not None and shown.steps
    assert isinstance(shown.pnl_usd, float | None)
