import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from babylon.core.errors import ConfigError, DatabaseError, ServingError
from babylon.core.game_rows import scenario_ticker
from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.core.windows import WindowState, window_at
from babylon.evaluation.rebuild.recorded_windows import rebuild_windows
from babylon.evaluation.rebuild.transitions import transitions_of
from babylon.game.fleet.answers import Reply, Turn, scripted_answers
from babylon.game.fleet.fleet_plan import FleetPlan, deal, plan_rounds
from babylon.game.fleet.play_fleet import FleetResult, play_fleet
from babylon.game.fleet.spawn import plan_fleet, run_fleet
from babylon.game.market.orders import Hold, Order, OrderKind, render_decision
from babylon.game.market.scenario import HOUR, STARTER, Rules
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder
from babylon.scoring.rewards.heuristic import heuristic
from babylon.stages.collect import collect_window
from babylon.stages.pending import window_to_train
from babylon.stages.validate import validate_window
from babylon.store import Store
from babylon.store.windows import claim_window, set_state
from tests.exported import news_buyer
from tests.integration.game import WINDOW, claim

PLAN = FleetPlan(start=datetime(2025, 11, 14, 9, tzinfo=UTC), duration_min=6, agents=4)
COUNT = "SELECT count(*) FROM trajectories"


async def test_a_scripted_fleet_leaves_all_its_records(store: Store, settings: Settings) -> None:
    result = await run_fleet(store, settings, PLAN, "scripted")
    assert (result.trajectories, result.calls, result.windows) == (4, 24, ("2025-11-14T09:00",))
    assert await store.pool.fetchval(COUNT) == 4
    assert await store.pool.fetchval("SELECT count(*) FROM llm_call_logs") == 24
    assert await store.pool.fetchval("SELECT count(*) FROM market_outcomes") == 3


async def test_a_numeric_policy_plays_a_fleet_and_its_play_is_learned_offline(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    policy = news_buyer(tmp_path / "policy")
    result = await run_fleet(store, settings, PLAN, str(policy))
    assert result.trajectories == 4
    models = await store.pool.fetch("SELECT DISTINCT model FROM llm_call_logs")
    assert [row["model"] for row in models] == ["numeric-dqn"]
    rebuilt = await rebuild_windows(store, result.windows)
    found = transitions_of(rebuilt.scenarios, STARTER)
    earned = [play.pnl_usd for one in rebuilt.scenarios for play in one.plays]
    assert found.rewards.reshape(4, 6).sum(1) * 100.0 == pytest.approx(earned, abs=1e-2)
    with pytest.raises(ConfigError, match="neither llm, scripted nor the directory"):
        await run_fleet(store, settings, PLAN, str(tmp_path))


@pytest.mark.parametrize("live", [False, True])
async def test_a_windows_outcomes_come_before_the_next_window(live: bool, store: Store) -> None:
    nine, ten = PLAN.start, PLAN.start + timedelta(hours=1)
    plan = replace(PLAN, start=ten - timedelta(minutes=12), duration_min=14, live=live)
    scripted = scripted_answers(plan.seed)
    there: dict[str, set[str]] = {}

    async def answer(turn: Turn) -> Reply:
        rows = await store.pool.fetch('SELECT DISTINCT "windowId" FROM market_outcomes')
        window_id = recorder.window(turn.trajectory_id).id
        there.setdefault(window_id, set()).update(row["windowId"] for row in rows)
        return await scripted(turn)

    recorder, tracker = TrajectoryRecorder(store), MarketOutcomesTracker(store)
    result = await play_fleet(plan, answer, recorder, tracker)
    first, second = window_at(nine).id, window_at(ten).id
    assert result.windows == (first, second)
    assert there == {first: set(), second: {first}}
    assert await store.pool.fetchval('SELECT count(DISTINCT "windowId") FROM market_outcomes') == 2


async def test_a_failed_call_ends_its_table_alone(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = scripted_answers(PLAN.seed)

    async def answer(turn: Turn) -> Reply:
        if turn.agent_id == "agent-1" and turn.step == 2:
            raise ServingError("agent-1 got no answer")
        return await scripted(turn)

    recorder, tracker = TrajectoryRecorder(store), MarketOutcomesTracker(store)
    result = await play_fleet(PLAN, answer, recorder, tracker)
    left = PLAN.agents - 1
    assert (result.abandoned, result.trajectories, await store.pool.fetchval(COUNT)) == (
        1,
        left,
        left,
    )
    assert "abandoned and not recorded: agent-1 got no answer" in caplog.text


async def test_simulated_play_is_not_stored_in_live_game(store: Store, settings: Settings) -> None:
    with pytest.raises(DatabaseError, match="unset DATABASE_URL"):
        await run_fleet(replace(store, game_tables_ours=False), settings, PLAN, "scripted")
    assert await store.pool.fetchval(COUNT) == 0


async def spawn(store: Store, settings: Settings, **spawned: Any) -> FleetResult:
    plan = await plan_fleet(store, settings.windows, settings.seed, **spawned)
    return await run_fleet(store, settings, plan, "scripted")


async def test_play_never_goes_into_a_window_that_was_trained(
    store: Store, settings: Settings
) -> None:
    played = [await spawn(store, settings, agents=3, duration_min=5)]
    trained = window_at(datetime.fromisoformat(played[0].windows[0]).replace(tzinfo=UTC))
    claim = await claim_window(store, trained, owner="test", lease_s=60)
    played.append(await spawn(store, settings, agents=3, duration_min=5))
    await set_state(store, claim, WindowState.TRAINED)
    await store.pool.execute("UPDATE babylon.windows SET lease_until = NULL")
    played.append(await spawn(store, settings, agents=3, duration_min=5))
    assert not {window for fleet in played[1:] for window in fleet.windows} & {trained.id}
    assert await store.pool.fetchval(COUNT) == 9


async def test_play_goes_into_a_window_that_can_be_trained_at_once(
    store: Store, settings: Settings
) -> None:
    # The last complete window is not settled.
    windows = settings.windows.model_copy(update={"grace_s": 3600.0})
    plan = await plan_fleet(store, windows, settings.seed, agents=3, duration_min=5)
    await run_fleet(store, settings, plan, "scripted")
    chosen = await window_to_train(store, windows, settings.quality)
    assert chosen.id == window_at(plan.start).id


HOUR_PLAN = replace(PLAN, rules=HOUR, duration_min=40, agents=6, agents_per_scenario=3, seed=4)


@pytest.mark.parametrize("shared", [False, True])
async def test_the_full_hour_is_scored(shared: bool, store: Store, settings: Settings) -> None:
    result = await run_fleet(store, settings, replace(HOUR_PLAN, shared=shared), "scripted")
    assert (result.trajectories, result.scenarios, result.calls) == (6, 2, 240)
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    validated = await validate_window(store, settings, collected)
    assert (validated.agents, validated.rejected) == (6, {})
    trajectories = read_trajectories(settings.home, validated.artifact)
    assert {len(t.calls) for t in trajectories} == {40}
    assert len({score.value for score in heuristic(trajectories)}) > 1
    rows = await store.pool.fetch('SELECT "stepsJson", "tradesExecuted" FROM trajectories')
    actions = Counter(
        step["action"]["actionType"] for row in rows for step in json.loads(row["stepsJson"])
    )
    traded = ("BUY_SHARES", "SELL_SHARES", "OPEN_PERP_POSITION", "CLOSE_PERP_POSITION")
    rare = "SELL_SHARES"  # few teachers sell, and only what they hold
    assert {*actions, rare} == {*traded, "CREATE_POST", "COMMENT", "HOLD"}
    decided = sum(actions[name] for name in traded)
    assert sum(row["tradesExecuted"] for row in rows) == decided
    assert sum(trajectory.trades for trajectory in trajectories) == decided
    assert 0 < sum(trajectory.wins for trajectory in trajectories) < decided


async def test_outcomes_hold_an_hours_questions_and_perps(store: Store, settings: Settings) -> None:
    await run_fleet(store, settings, HOUR_PLAN, "scripted")
    rows = await store.pool.fetch("SELECT * FROM market_outcomes")
    (start, ticks), *_ = plan_rounds(HOUR_PLAN)
    for scenario, _ in deal(HOUR_PLAN, start, ticks, 0):
        questions = {
            row["predictionMarketId"]: row["outcome"]
            for row in rows
            if (row["predictionMarketId"] or "").startswith(f"{scenario.scenario_id}:")
        }
        assert questions == {
            f"{scenario.scenario_id}:{q.market_id}": q.outcome.value for q in scenario.questions
        }
        moves = {row["stockTicker"]: (row["startPrice"], row["endPrice"]) for row in rows}
        for perp in scenario.perps:
            recorded = tuple(map(float, moves[scenario_ticker(scenario.scenario_id, perp.ticker)]))
            assert recorded == (perp.prices[0], perp.prices[-1])
    assert len(rows) == 2 * (5 + 5)


async def last_prices(store: Store, *, shared: bool) -> list[str]:
    """The prices that each of two agents saw in its second tick, after agent-0 alone had traded."""
    seen: dict[str, str] = {}

    async def answer(turn: Turn) -> Reply:
        lines = turn.messages[1]["content"].splitlines()
        seen[turn.agent_id] = next(line for line in lines if line.startswith("YES prices"))
        order = Order("m1", OrderKind.BUY_YES, 150) if turn.agent_id == "agent-0" else Hold()
        return Reply(render_decision(order), model="test")

    plan = replace(PLAN, agents=2, duration_min=2, shared=shared, fleet_id=f"shared-{shared}")
    await play_fleet(plan, answer, TrajectoryRecorder(store), MarketOutcomesTracker(store))
    return [price for _, price in sorted(seen.items())]


async def test_agents_move_each_others_prices_in_shared_markets_only(
    store: Store,
) -> None:
    mover, alone = await last_prices(store, shared=False)
    assert mover != alone
    assert await last_prices(store, shared=True) == [mover, mover]


@pytest.mark.parametrize(("rules", "tickers"), [(STARTER, 0), (HOUR, 2 * 5)])
async def test_agents_are_spawned_into_the_game_that_is_asked_for(
    rules: Rules, tickers: int, store: Store, settings: Settings
) -> None:
    spawned = {"agents": 2, "duration_min": 5, "rules": rules}
    for shared in (False, True):
        await spawn(store, settings, shared=shared, **spawned)
    count = 'SELECT count(DISTINCT "stockTicker") FROM market_outcomes'
    assert await store.pool.fetchval(count) == tickers
