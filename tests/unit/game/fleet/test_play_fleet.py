from dataclasses import replace
from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.core.errors import ServingError
from babylon.core.windows import window_at
from babylon.game.fleet.answers import Reply, Turn, call_seed, scripted_answers
from babylon.game.fleet.fleet_plan import FleetPlan, deal, fleet_start, plan_rounds
from babylon.game.fleet.play_fleet import play_fleet
from babylon.game.market.game import Game
from babylon.game.market.scenario import HOUR
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def plan(**changes: object) -> FleetPlan:
    return FleetPlan(**{"start": NOON, "duration_min": 10, "agents": 5, **changes})  # type: ignore[arg-type]


def test_ten_minutes_are_one_round_and_an_hour_is_six() -> None:
    assert plan_rounds(plan()) == [(NOON, 10)]
    assert [ticks for _, ticks in plan_rounds(plan(duration_min=60))] == [10] * 6


@given(st.integers(0, 24 * 60), st.integers(1, 300), st.sampled_from([15, 30, 60, 120]))
def test_rounds_stay_in_a_window(offset_min: int, duration_min: int, window_minutes: int) -> None:
    start = NOON + timedelta(minutes=offset_min)
    rounds = plan_rounds(
        plan(start=start, duration_min=duration_min, window_minutes=window_minutes)
    )
    assert sum(ticks for _, ticks in rounds) == duration_min
    for moment, ticks in rounds:
        last = moment + timedelta(minutes=ticks) - timedelta(microseconds=1)
        assert window_at(moment, window_minutes) == window_at(last, window_minutes)


@pytest.mark.parametrize(("duration_min", "hours"), [(10, 1), (60, 1), (61, 2), (180, 3)])
def test_a_fast_fleet_plays_in_windows_that_are_over(duration_min: int, hours: int) -> None:
    now = NOON + timedelta(minutes=25)
    start = fleet_start(now, duration_min, 60)
    assert start == NOON - timedelta(hours=hours)
    assert start + timedelta(minutes=duration_min) <= NOON


@pytest.mark.parametrize(("taken", "hours"), [((1,), 3), ((2,), 4), ((1, 2, 4), 6), ((3,), 2)])
def test_a_fast_fleet_keeps_out_of_taken_windows(taken: tuple[int, ...], hours: int) -> None:
    ids = {window_at(NOON - timedelta(hours=ago)).id for ago in taken}
    assert fleet_start(NOON, 120, 60, ids) == NOON - timedelta(hours=hours)


@pytest.mark.parametrize(("agents", "tables"), [(1, [1]), (5, [5]), (12, [6, 6]), (64, [8] * 8)])
def test_agents_are_dealt_into_scenarios_evenly(agents: int, tables: list[int]) -> None:
    dealt = deal(plan(agents=agents), NOON, 10, number=0)
    assert sorted(len(members) for _, members in dealt) == tables
    assert len({agent for _, members in dealt for agent in members}) == agents
    assert len({scenario.scenario_id for scenario, _ in dealt}) == len(tables)
    assert all(len(scenario.scenario_id) <= 100 for scenario, _ in dealt)


def test_another_seed_or_hour_is_another_world() -> None:
    worlds = {
        deal(plan(seed=seed), moment, 10, number=0)[0][0].questions
        for seed in (1, 2)
        for moment in (NOON, NOON + timedelta(hours=1))
    }
    assert len(worlds) == 4


def turn(trajectory_id: str = "t", agent_id: str = "agent-0", step: int = 0) -> Turn:
    ((scenario, _),) = deal(plan(), NOON, 10, number=0)
    return Turn(agent_id, trajectory_id, step, [], Game(scenario))


async def test_a_seed_repeats_the_play_whatever_the_trajectory_is_called() -> None:
    agents = [f"agent-{number}" for number in range(20)]
    plays = [
        [await scripted_answers(seed)(turn(trajectory_id, agent)) for agent in agents]
        for seed, trajectory_id in ((1, "a"), (1, "b"), (2, "a"))
    ]
    assert plays[0] == plays[1] != plays[2]
    assert call_seed(1, turn("a")) == call_seed(1, turn("b"))


def test_every_call_has_a_seed_of_its_own() -> None:
    turns = [turn(agent_id=agent, step=step) for agent in ("a", "b") for step in (0, 1)]
    assert len({call_seed(seed, one) for seed in (1, 2) for one in turns}) == 8


async def test_an_endpoint_that_is_down_is_one_error_and_records_nothing() -> None:
    async def no_answer(_turn: Turn) -> Reply:
        raise ServingError("nobody answers")

    store = AsyncMock(game_problem="", records=True)
    with pytest.raises(ServingError, match="nobody answers"):
        await play_fleet(plan(), no_answer, TrajectoryRecorder(store), MarketOutcomesTracker(store))
    assert not store.pool.mock_calls


def test_a_round_of_the_full_game_is_an_hour_or_as_much_as_its_window_has() -> None:
    assert plan_rounds(plan(rules=HOUR, duration_min=60)) == [(NOON, 60)]
    quarter = plan_rounds(plan(rules=HOUR, duration_min=30, window_minutes=15))
    assert quarter == [(NOON, 15), (NOON + timedelta(minutes=15), 15)]


def test_live_fleets_whose_funding_is_due_at_other_ticks_are_not_compared() -> None:
    live = plan(rules=HOUR, live=True)
    starts = (NOON + timedelta(minutes=5), NOON + timedelta(minutes=25))
    first, second = (deal(live, start, 10, number=0)[0][0] for start in starts)
    assert first.start_minute != second.start_minute and first.questions == second.questions
    assert first.scenario_id != second.scenario_id
    without = [deal(plan(live=True), start, 10, number=0)[0][0] for start in starts]
    assert without[0].scenario_id == without[1].scenario_id


def test_scenarios_are_by_the_plans_rules_and_know_what_time_it_is() -> None:
    ((scenario, _),) = deal(plan(rules=HOUR), NOON + timedelta(minutes=5), 30, number=0)
    assert scenario.rules == replace(HOUR, ticks=30)
    assert scenario.start_minute == 12 * 60 + 5
    assert len(scenario.perps) == 5


def test_only_who_faces_the_same_has_a_scenario_of_the_same_name() -> None:
    def name(ticks: int, **changes: object) -> str:
        ((scenario, _),) = deal(plan(**changes), NOON, ticks, number=0)
        return scenario.scenario_id

    demo = name(6)
    assert demo == "2026-11-21T12:00-s0r0t0"
    names = [demo, name(10), name(6, shared=True), name(60, rules=HOUR), name(30, rules=HOUR)]
    assert len({*names, name(60, rules=replace(HOUR, opponents=("news",)))}) == 6
    assert name(60, rules=HOUR) == names[3]
