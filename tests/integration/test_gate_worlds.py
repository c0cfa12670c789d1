"""The gate plays the fleet's own world, and says what decided where no world can be made."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from babylon.core.settings import EvaluationSettings, Settings
from babylon.core.types import CANARY, Claim, OffPolicy, Trained
from babylon.core.windows import parse_window_id
from babylon.evaluation.arena.match import compare
from babylon.evaluation.arena.play import scripted
from babylon.evaluation.arena.recorded_worlds import gate_worlds
from babylon.evaluation.arena.verdicts import recorded_verdict
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import HOUR, MAX_TEXT, STARTER, Rules
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.store import Store
from babylon.store.windows import claim_window
from tests.integration.game import WINDOW, insert_real_window

UNRELIABLE = replace(STARTER, news_reliability=0.05)
FLEET = EvaluationSettings(scenarios=256)


async def played(
    store: Store, settings: Settings, hour: int, rules: Rules, *, shared: bool = False
) -> str:
    """Let sixteen scripted agents play one game of an hour; return the window's id."""
    start = datetime(2025, 11, 14, hour, tzinfo=UTC)
    plan = FleetPlan(start=start, duration_min=6, agents=16, rules=rules, shared=shared)
    await run_fleet(store, settings, plan, "scripted")
    window = f"2025-11-14T{hour:02}:00"
    await claim_window(store, parse_window_id(window), owner="worker", lease_s=60)
    return window


async def test_when_the_news_turn_the_gate_follows_the_fleet(
    store: Store, settings: Settings
) -> None:
    """A champion that believes the news, and a challenger that has learnt not to."""
    await played(store, settings, 8, STARTER)
    turned = await played(store, settings, 9, UNRELIABLE)
    trained_on = await played(store, settings, 10, UNRELIABLE)
    worlds = await gate_worlds(store, trained_on, "seed", FLEET)
    assert worlds is not None and worlds.budget == 256
    first = worlds.batches[0]
    assert first.source == "recorded" and len(first.scenarios) == 2
    assert all(turned in scenario.scenario_id for scenario in first.scenarios)  # its own are not
    assert {world.rules.news_reliability for world in worlds.scenarios} == {0.05}
    recipe = await gate_worlds(store, f"{trained_on}+again", "seed", FLEET)
    assert recipe is not None and recipe.batches[0] == first

    believer, doubter = (scripted(SCRIPTED_AGENTS[name]) for name in ("news", "contrarian"))
    match = await compare(believer, doubter, worlds)
    assert match.ruling == "promote" and match.worlds == {"recorded": 2, "simulated": 128}
    backwards = await compare(doubter, believer, worlds)
    assert backwards.ruling == "reject"


async def test_a_fleet_in_shared_markets_is_judged_in_shared_markets(
    store: Store, settings: Settings
) -> None:
    await played(store, settings, 8, STARTER, shared=True)
    window = await played(store, settings, 9, STARTER, shared=True)
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None and worlds.seats == 8
    assert worlds.batches[0].source == "recorded"


async def test_plays_alone_and_a_long_one_do_not_change_the_gate_of_a_fleet_in_shared_markets(
    store: Store, settings: Settings
) -> None:
    for hour in (8, 9):
        window = await played(store, settings, hour, STARTER, shared=True)
        start = datetime(2025, 11, 14, hour, tzinfo=UTC)
        for minutes in (6, 10):
            plan = FleetPlan(start=start, duration_min=minutes, agents=2, seed=minutes)
            await run_fleet(store, settings, plan, "scripted")
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None and worlds.seats == 8
    assert worlds.played(worlds.budget)["recorded"] == 2
    assert {world.rules.ticks for world in worlds.scenarios} == {6}


async def test_older_windows_weigh_less(store: Store, settings: Settings) -> None:
    for hour in range(1, 8):
        start = datetime(2025, 11, 14, hour, tzinfo=UTC)
        plan = FleetPlan(start=start, duration_min=6, agents=48, agents_per_scenario=1)
        await run_fleet(store, settings, plan, "scripted")
        window = f"2025-11-14T{hour:02}:00"
        await claim_window(store, parse_window_id(window), owner="worker", lease_s=60)
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None
    recorded = [batch for batch in worlds.batches if batch.source == "recorded"]
    assert [len(batch.scenarios) for batch in recorded] == [48, 16]  # a quarter of the budget
    assert [batch.weight for batch in recorded] == pytest.approx([1.0, 0.5**0.25])


async def test_a_preset_is_played_only_if_asked_for(store: Store) -> None:
    """Without a row nothing shows that the demo's game is the task that the policy is for."""
    hours = EvaluationSettings(scenarios=32, rules="hour")
    worlds = await gate_worlds(store, "2025-11-14T09:00", "seed", hours)
    assert worlds is not None and {world.rules for world in worlds.scenarios} == {HOUR}
    assert await gate_worlds(store, "2025-11-14T09:00", "seed", FLEET) is None


async def test_a_row_without_a_window_id_costs_only_itself(
    store: Store, settings: Settings
) -> None:
    await played(store, settings, 8, STARTER)
    window = await played(store, settings, 9, STARTER)
    await store.pool.execute(
        'UPDATE trajectories SET "windowId" = NULL, "scenarioId" = NULL'
        ' WHERE "trajectoryId" = (SELECT min("trajectoryId") FROM trajectories)'
    )
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None and worlds.batches[0].source == "recorded"


async def test_the_rules_of_one_row_do_not_choose_the_game_of_all(
    store: Store, settings: Settings
) -> None:
    """A client may record what it likes. There are names for twenty markets."""
    window = await played(store, settings, 8, STARTER)
    change = """UPDATE trajectories SET "stepsJson" = replace("stepsJson", '"markets":3', $1)"""
    first = ' WHERE "trajectoryId" = (SELECT min("trajectoryId") FROM trajectories)'
    assert await store.pool.execute(change + first, '"markets":999') == "UPDATE 1"
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None and {one.rules for one in worlds.scenarios} == {STARTER}
    await store.pool.execute(change, '"markets":999')  # of a newer version of the game
    assert await gate_worlds(store, window, "seed", FLEET) is None


async def test_no_world_of_the_gate_has_a_text_that_an_engine_refuses(
    store: Store, settings: Settings
) -> None:
    await played(store, settings, 8, STARTER)
    window = await played(store, settings, 9, STARTER)
    long = """UPDATE trajectories SET "stepsJson" = replace("stepsJson", '"text":"', $1)
        WHERE "trajectoryId" = (SELECT min("trajectoryId") FROM trajectories
        WHERE "startTime" < '2025-11-14T09:00')"""
    assert await store.pool.execute(long, f'"text":"{"x " * 40_000}') == "UPDATE 1"
    worlds = await gate_worlds(store, window, "seed", FLEET)
    assert worlds is not None and worlds.batches[0].source == "recorded"
    texts = [q.text for world in worlds.scenarios for q in world.questions]
    assert max(map(len, texts)) <= MAX_TEXT


async def test_no_world_of_the_trained_time_is_played_after_a_change_of_the_windows_length(
    store: Store, settings: Settings
) -> None:
    """The fleet's ids name hours. The newest of two hours was trained in windows of 15 minutes."""
    start = datetime(2025, 11, 14, 8, tzinfo=UTC)
    plan = FleetPlan(start=start, duration_min=120, agents=2, agents_per_scenario=2)
    await run_fleet(store, settings, plan, "scripted")
    for name, minutes in (("2025-11-14T08:00", 120), ("2025-11-14T09:30", 15)):
        await claim_window(store, parse_window_id(name, minutes), owner="worker", lease_s=60)
    began = await store.pool.fetch('SELECT DISTINCT "startTime" FROM trajectories ORDER BY 1')
    trained = [row[0] for row in began if (9, 30) <= (row[0].hour, row[0].minute) < (9, 45)]
    worlds = await gate_worlds(store, "2025-11-14T09:30", "seed", FLEET)
    assert worlds is not None and trained
    played = [batch.scenarios for batch in worlds.batches if batch.source == "recorded"]
    assert len(sum(played, ())) == len(began) - len(trained)


async def test_rows_of_the_live_game_lead_to_recorded_play_or_a_canary(store: Store) -> None:
    await insert_real_window(store)
    assert await gate_worlds(store, WINDOW.id, "seed", FLEET) is None
    trained = Trained(
        claim=Claim(window_id=WINDOW.id, epoch=1, owner="worker"),
        batch_id="b",
        policy_version=1,
        parent_version=0,
        checkpoint_uri="file:///nowhere",
        metrics={},
    )
    cases = [
        (OffPolicy(problem="too small: ESS 3.0"), True, CANARY),
        (OffPolicy(difference=9.0, low=1.0, high=17.0, gain=True), True, "recorded play"),
        (OffPolicy(difference=-9.0, low=-17.0, high=-1.0), False, "recorded play"),
    ]
    for check, promote, evidence in cases:
        verdict = recorded_verdict(trained, 1, check)
        assert (verdict.promote, verdict.evidence) == (promote, evidence)
