"""Recorded fleets, played again: from Postgres and from a dataset."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from re import findall

import polars as pl
import pyarrow.dataset
import pytest

from babylon.core.errors import ArenaError, ModelError, ReplayError
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, Trajectory
from babylon.core.types import Claim, Verdict
from babylon.dataset.build import build_tables, windows_of
from babylon.dataset.performance import performance_rows, played_rows
from babylon.dataset.replay.comparison import replay_report
from babylon.dataset.replay.counterfactual import replay
from babylon.dataset.replay.dataset_reader import read_dataset
from babylon.dataset.trajectories import Consent, Selection
from babylon.evaluation.arena.play import scripted
from babylon.evaluation.rebuild.recorded import Rebuilt
from babylon.evaluation.rebuild.recorded_windows import rebuild_windows, recorded_windows
from babylon.game.fleet.fleet_plan import FleetPlan, deal
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import HOUR, STARTER, Rules
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.stages.deploy import deploy_checkpoint
from babylon.store import Store, open_store
from babylon.store.policies import commit_policy, ensure_base, set_verdict
from tests.integration.game import WINDOW, insert_real_window
from tests.tiny_policy import tiny_model, tiny_tokenizer
from tests.trajectories import a_trajectory

NINE = datetime(2025, 11, 14, 9, tzinfo=UTC)
CENT = 0.01
FULL = replace(HOUR, ticks=12)
RIVALS = replace(STARTER, opponents=("random", "momentum"))


def plan(rules: Rules = STARTER, *, shared: bool = False, agents: int = 4) -> FleetPlan:
    return FleetPlan(
        start=NINE, duration_min=max(10, rules.ticks), agents=agents, rules=rules, shared=shared
    )


async def rebuilt(store: Store) -> Rebuilt:
    return await rebuild_windows(store, await recorded_windows(store, "2025-11"))


@pytest.mark.parametrize("rules", [STARTER, FULL, RIVALS], ids=["starter", "full", "rivals"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
async def test_every_recorded_agent_makes_its_recorded_pnl_again(
    store: Store, settings: Settings, rules: Rules, shared: bool
) -> None:
    await run_fleet(store, settings, plan(rules, shared=shared), "scripted")
    found = await rebuilt(store)
    assert not found.skipped
    results = [
        result
        for agent in (f"agent-{i}" for i in range(4))
        for result in replay(found.scenarios, agent)
    ]
    assert len(results) == 4 * len(found.scenarios)
    assert max(abs(result.difference) for result in results) < CENT
    assert len({round(result.recorded_pnl, 2) for result in results}) > 2


@pytest.mark.parametrize("rules", [STARTER, FULL], ids=["starter", "full"])
async def test_a_rebuilt_scenario_equals_the_played_one(
    store: Store, settings: Settings, rules: Rules
) -> None:
    """The crowd's orders were never written down; they are found again to the last digits."""
    await run_fleet(store, settings, plan(rules), "scripted")
    (recorded,) = (await rebuilt(store)).scenarios
    ((played, _),) = deal(plan(rules), NINE, max(10, rules.ticks), 0)
    found = recorded.scenario
    assert recorded.prices == "exact"
    assert replace(found, noise=()) == replace(played, noise=())
    for ours, theirs in zip(found.noise, played.noise, strict=True):
        assert ours and theirs and (ours.market_id, ours.side) == (theirs.market_id, theirs.side)
        assert ours.dollars == pytest.approx(theirs.dollars, abs=1e-9)


async def test_another_agent_in_its_place_has_the_world(store: Store, settings: Settings) -> None:
    await run_fleet(store, settings, plan(FULL, shared=True), "scripted")
    found = (await rebuilt(store)).scenarios
    (holds,) = replay(found, "agent-1", scripted(SCRIPTED_AGENTS["hold"]))
    (knows,) = replay(found, "agent-1", scripted(SCRIPTED_AGENTS["oracle"]))
    assert holds.replayed_pnl == 0 < knows.replayed_pnl
    assert holds.recorded_pnl == knows.recorded_pnl
    assert replay(found, "agent-1", scripted(SCRIPTED_AGENTS["random"])) == replay(
        found, "agent-1", scripted(SCRIPTED_AGENTS["random"])
    )


async def tamper(store: Store, change: str, to: str) -> None:
    await store.pool.execute(
        'UPDATE trajectories SET "stepsJson" = replace("stepsJson", $1, $2),'
        ' "metadataJson" = replace("metadataJson", $1, $2)',
        change,
        to,
    )


@pytest.mark.parametrize(
    ("change", "to", "reason"),
    [
        ('"actualOutcomes"', '"nothing"', "the outcome of m1 is neither in"),
        ('"pools"', '"puddles"', "step 0 has no valid environmentState.market"),
        ('"purpose":"action"', '"purpose":"evaluation"', "step 0 has no reply"),
        ('"yes":', '"yes":1', "do not follow from the recorded decisions"),
        ('"ticks":10', '"ticks":11', "10 of 11 ticks are recorded"),
    ],
)
async def test_what_was_not_recorded_or_was_changed_is_named(
    store: Store, settings: Settings, change: str, to: str, reason: str
) -> None:
    await run_fleet(store, settings, plan(), "scripted")
    await store.pool.execute("DELETE FROM market_outcomes")
    await tamper(store, change, to)
    found = await rebuilt(store)
    assert not found.scenarios
    assert reason in found.skipped[0].reason
    with pytest.raises(ReplayError, match="nothing of 2025-11 can be replayed: trajectory"):
        await replay_report(
            partial(open_store, settings), settings.seed, "2025-11", "agent-0", "recorded"
        )


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            '"stepsJson" = replace("stepsJson", \'\\"amount\\":\', \'\\"amount\\":1\')',
            "but its recorded decisions lead to $",
        ),
        ('"finalPnL" = "finalPnL" + 1', "at the end its balance is $"),
        ('"stepsJson" = replace("stepsJson", \'"yes":\', \'"yes":1\')', "in tick 0 the "),
    ],
    ids=["decision", "pnl", "reserves"],
)
async def test_every_row_is_checked_and_not_the_first_alone(
    store: Store, settings: Settings, shared: bool, change: str, reason: str
) -> None:
    """In copies of a market the others are replayed; a shared one falls as a whole."""
    await run_fleet(store, settings, plan(shared=shared, agents=5), "scripted")
    (liar,) = await store.pool.fetch(
        'SELECT "agentId" AS id FROM trajectories WHERE "agentId" <> \'agent-0\''
        ' ORDER BY "tradesExecuted" DESC, "agentId" LIMIT 1'
    )
    await store.pool.execute(f'UPDATE trajectories SET {change} WHERE "agentId" = $1', liar["id"])
    found = await rebuilt(store)
    (skipped,) = found.skipped
    assert reason in skipped.reason or "differ from those of most agents" in skipped.reason
    if shared:
        assert not found.scenarios
    else:
        (recorded,) = found.scenarios
        assert len(recorded.plays) == 4
        assert liar["id"] not in {play.agent_id for play in recorded.plays}


async def test_reserves_without_any_order_are_refused(store: Store, settings: Settings) -> None:
    await run_fleet(store, settings, plan(Rules(noise_order=0.0)), "scripted")
    await tamper(store, '"marketId":"m2","yes":', '"marketId":"m2","yes":1')
    skipped = (await rebuilt(store)).skipped[0]
    assert "the reserves of m2 are 1500/500: no order leads there" in skipped.reason


async def test_fleets_of_one_hour_and_seed_are_told_apart(store: Store, settings: Settings) -> None:
    """Alone, even when their scenarios have one name; in shared markets only if they differ."""
    for one in (plan(), plan(), plan(FULL, shared=True), replace(plan(), duration_min=6)):
        await run_fleet(store, settings, one, "scripted")
    found = await rebuilt(store)
    assert sorted((len(one.plays), one.scenario.rules.ticks) for one in found.scenarios) == [
        (4, 6), (4, 12), (8, 10)
    ]  # fmt: skip
    assert len(replay(found.scenarios, "agent-0")) == 4
    await run_fleet(store, settings, plan(FULL, shared=True), "scripted")
    (skipped,) = (await rebuilt(store)).skipped
    assert "8 trajectories of 4 players: several fleets" in skipped.reason


async def test_a_shared_market_needs_all_its_players(store: Store, settings: Settings) -> None:
    await run_fleet(store, settings, plan(shared=True), "scripted")
    await store.pool.execute("DELETE FROM trajectories WHERE \"agentId\" = 'agent-2'")
    (skipped,) = (await rebuilt(store)).skipped
    assert "shared with agent-2, whose rows are missing" in skipped.reason


async def trained(store: Store, settings: Settings) -> None:
    """As if the window had been trained: scored, and its manifest stored."""
    from babylon.core.windows import WindowState
    from babylon.stages.collect import collect_window
    from babylon.stages.dropout import thin_window
    from babylon.stages.score import score_window
    from babylon.stages.validate import validate_window
    from babylon.store.windows import claim_window, set_state

    claim = await claim_window(store, WINDOW, owner="test", lease_s=60)
    collected = await collect_window(store, settings.home, claim, WINDOW)
    validated = await validate_window(store, settings, collected)
    thinned = thin_window(settings, validated)
    scored = await score_window(store, settings, thinned)
    await set_state(store, claim, WindowState.TRAINED, scored=scored)
    await set_state(store, claim, WindowState.DEPLOYED)


@pytest.fixture
def heuristic(settings: Settings) -> Settings:
    return settings.replace(scoring={"scorer": "heuristic"})


async def built(store: Store, settings: Settings) -> dict[str, Path]:
    await trained(store, settings)
    (scored,) = await windows_of(store)
    first = await build_tables(store, settings.home, scored, Selection())
    again = await build_tables(store, settings.home, scored, Selection())
    assert again == first  # the same bytes
    return {path.parts[-3]: path for path in settings.home.datasets.rglob("*.parquet")}


@pytest.mark.parametrize(
    ("rules", "shared"), [(STARTER, False), (FULL, False), (FULL, True)], ids=str
)
async def test_a_dataset_replays_as_the_database_does(
    store: Store, heuristic: Settings, rules: Rules, shared: bool
) -> None:
    await run_fleet(store, heuristic, plan(rules, shared=shared), "scripted")
    files = await built(store, heuristic)
    assert [*sorted(files)] == ["model_performance", "outcomes", "scenarios", "trajectories"]
    from_database = (await rebuilt(store)).scenarios
    for place in (
        heuristic.home.datasets,
        heuristic.home.datasets / "scenarios",
        files["trajectories"],
    ):
        from_files = read_dataset(place, "2025-11").scenarios
        assert [one.scenario for one in from_files] == [one.scenario for one in from_database]
        assert [one.players for one in from_files] == [one.players for one in from_database]
        for one in replay(from_files, "agent-3"):
            assert abs(one.difference) < CENT


async def test_agents_that_did_not_agree_are_in_no_table(store: Store, heuristic: Settings) -> None:
    for shared in (False, True):
        start = NINE.replace(minute=20 * shared)
        own = replace(plan(shared=shared), start=start)
        await run_fleet(store, heuristic, own, "scripted")
    await trained(store, heuristic)
    (scored,) = await windows_of(store)
    agreed = Selection(agents=Consent(("agent-1",)))
    assert Consent(("team[1]", "b*")).covers("team[1]") and Consent(("b*",)).covers("bo")
    assert not any(Consent(("team[1]", "a?")).covers(name) for name in ("team1", "ab"))
    await build_tables(store, heuristic.home, scored, agreed)
    for table in ("trajectories", "scenarios"):
        rows = pl.read_parquet(heuristic.home.datasets / table / "**" / "*.parquet").to_dicts()
        assert rows and not {"agent-0", "agent-2", "agent-3"} & {*findall(r"agent-\d", str(rows))}
    scenarios = pl.read_parquet(heuristic.home.datasets / "scenarios" / "**" / "*.parquet")
    assert scenarios["players"].list.len().sum() == 0  # a shared market needs all its players
    plays = scenarios["trajectory_ids"].list.len().to_list()
    assert plays and max(plays) == 1


async def test_parquet_readers_take_a_table_as_a_whole(store: Store, heuristic: Settings) -> None:
    await run_fleet(store, heuristic, plan(), "scripted")
    files = await built(store, heuristic)
    for table, file in files.items():
        folder = heuristic.home.datasets / table
        one = pl.read_parquet(file)
        assert pl.read_parquet(folder / "**" / "*.parquet").equals(one)
        arrow = pyarrow.dataset.dataset(folder).to_table()
        assert arrow.num_rows == one.height and {*arrow.column_names} == {*one.columns}


async def test_only_one_scenarios_column_has_the_truth(store: Store, heuristic: Settings) -> None:
    await run_fleet(store, heuristic, plan(FULL), "scripted")
    files = await built(store, heuristic)
    scenarios = pl.read_parquet(files["scenarios"])
    (row,) = scenarios.rows(named=True)
    assert (row["markets"], row["perps"], row["ticks"], row["agents"]) == (5, 5, 12, 4)
    assert row["month"] == "2025-11" and row["best_pnl_usd"] >= row["mean_pnl_usd"]
    knowledge = json.loads(row.pop("knowledge_json"))
    assert {question["outcome"] for question in knowledge["questions"]} <= {"YES", "NO"}
    last = str(knowledge["perps"][0]["prices"][-1])
    trajectories = pl.read_parquet(files["trajectories"])
    truth = ("outcome_rewards", "ground_truth_json")
    others = [trajectories.drop(truth), pl.read_parquet(files["model_performance"])]
    for table in (pl.DataFrame([row]), *others):
        told = table.write_json()
        assert "outcome" not in told and last not in told


async def test_a_report_compares_and_lists_what_is_left(store: Store, settings: Settings) -> None:
    await run_fleet(store, settings, plan(), "scripted")
    report = await replay_report(
        partial(open_store, settings), settings.seed, "2025-11", "agent-0", "scripted:oracle"
    )
    assert report.mean_replayed > report.mean_recorded
    summary = report.summary()
    assert summary["mean_replayed_pnl"] == report.mean_replayed
    assert summary["scenarios"][0]["difference"] == report.results[0].difference
    with pytest.raises(ReplayError, match="recorded agents: agent-0,"):
        await replay_report(
            partial(open_store, settings), settings.seed, "2025-11", "nobody", "recorded"
        )
    with pytest.raises(ArenaError, match="no scripted agent is called 'hero'"):
        await replay_report(
            partial(open_store, settings), settings.seed, "2025-11", "agent-0", "scripted:hero"
        )
    with pytest.raises(ArenaError, match="'neither' is not a player"):
        await replay_report(
            partial(open_store, settings), settings.seed, "2025-11", "agent-0", "neither"
        )
    with pytest.raises(ReplayError, match="no trajectory was recorded in 2024-01"):
        await replay_report(
            partial(open_store, settings), settings.seed, "2024-01", "agent-0", "recorded"
        )


async def test_a_policy_replays_by_its_path_or_version(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    """A random policy writes no JSON: every decision is malformed, and nothing is won or lost."""
    await run_fleet(store, settings, replace(plan(), duration_min=2), "scripted")
    path = tmp_path / "tiny"
    tiny_model(1, max_position_embeddings=1024).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    await ensure_base(store, uri=str(path), base_model="tiny")
    for policy in (str(path), "0"):
        (result,) = (
            await replay_report(
                partial(open_store, settings), settings.seed, WINDOW.id, "agent-0", policy
            )
        ).results
        assert (result.malformed, result.replayed_pnl) == (1.0, 0.0)
    with pytest.raises(ModelError, match="there is no policy version 7"):
        await replay_report(partial(open_store, settings), settings.seed, WINDOW.id, "agent-0", "7")


async def test_performance_tells_play_and_gate(store: Store, heuristic: Settings) -> None:
    await run_fleet(store, heuristic, plan(), "scripted")
    await trained(store, heuristic)
    (scored,) = await windows_of(store)
    await ensure_base(store, uri="base", base_model="/home/ann/tiny")
    rows = await store.pool.fetch('SELECT "trajectoryId" AS id FROM trajectories ORDER BY 1')
    claim = Claim(window_id=WINDOW.id, epoch=1, owner="test")
    await store.pool.execute("UPDATE babylon.windows SET state = 'claimed'")
    version = await commit_policy(
        store, claim, parent_version=0, kind="lora", uri="one", base_model="tiny", batch_id="b",
        trajectory_ids=[row["id"] for row in rows], metrics={},
    )  # fmt: skip
    verdict = Verdict(
        claim=claim, policy_version=version, route_version=1, promote=True, reason="better",
        scenarios=512, pnl_before=1.0, pnl_after=2.0, win_rate_before=0.4, win_rate_after=0.5,
        malformed_before=0.1, malformed_after=0.0,
    )  # fmt: skip
    await set_verdict(store, claim, version, asdict(verdict))
    table = pl.DataFrame(await performance_rows(store, heuristic.home, scored, Selection()))
    columns = ("policy_version", "measured", "scenarios", "pnl_usd", "win_rate", "promoted")
    assert table.select(columns).rows() == [
        (0, "validation", 512, 1.0, 0.4, None), (1, "validation", 512, 2.0, 0.5, True)
    ]  # fmt: skip
    assert table["parent_version"].to_list() == [None, 0]
    assert table["base_model"].to_list() == ["tiny", "tiny"]  # and no path of this machine

    await deploy_checkpoint(store, heuristic, verdict)
    await set_verdict(store, claim, version, asdict(replace(verdict, route_version=2)))
    # Its parent was the champion.
    again = await performance_rows(store, heuristic.home, scored, Selection())
    assert [row["policy_version"] for row in again] == [0, 1]


def test_a_trajectory_is_the_policy_s_that_all_its_known_calls_are_from() -> None:
    def played(name: str, pnl: float, *versions: int | None) -> Trajectory:
        calls = [
            Call(step=i, messages=(), response="x", policy_version=version)
            for i, version in enumerate(versions)
        ]
        return a_trajectory(name, pnl_usd=pnl, calls=tuple(calls))

    rows = list(
        played_rows(
            [
                played("a", 10.0, 3, 3),
                played("b", 20.0, 3, None),
                played("c", 7.0, 4),
                played("d", 99.0, 3, 4),
                played("e", 99.0, None),
            ]
        )
    )
    told = [(row["policy_version"], row["trajectories"], row["pnl_usd"]) for row in rows]
    assert told == [(3, 2, 15.0), (4, 1, 7.0)]


async def test_datasets_need_scenarios(store: Store, heuristic: Settings, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="missing does not exist"):
        read_dataset(tmp_path / "missing", "2025-11")
    (tmp_path / "trajectories").mkdir()
    with pytest.raises(ReplayError, match="has no folder scenarios beside trajectories"):
        read_dataset(tmp_path, "2025-11")
    await run_fleet(store, heuristic, plan(), "scripted")
    await built(store, heuristic)
    with pytest.raises(ReplayError, match=r"has no rows of 2025-12: there are 1 files"):
        read_dataset(heuristic.home.datasets, "2025-12")


async def test_dirty_rows_are_named_the_others_replayed(store: Store, settings: Settings) -> None:
    """In copies of a market an agent's row stands for itself."""
    await run_fleet(store, settings, plan(), "scripted")
    for agent, column, text in (
        ("agent-1", "stepsJson", "[{}]"),
        ("agent-2", "stepsJson", "[]"),
        ("agent-3", "metadataJson", "{"),
    ):
        await store.pool.execute(
            f'UPDATE trajectories SET "{column}" = $1 WHERE "agentId" = $2', text, agent
        )
    found = await rebuilt(store)
    assert [play.agent_id for play in found.scenarios[0].plays] == ["agent-0"]
    reasons = [one.reason.split(": ", 1)[1] for one in found.skipped]
    assert [reason.split(":")[0] for reason in reasons] == [
        "missing_field", "empty_steps", "malformed_json"
    ]  # fmt: skip


async def test_a_file_that_is_no_dataset_s_is_named(tmp_path: Path) -> None:
    for table in ("scenarios", "trajectories"):
        (tmp_path / table).mkdir()
        (tmp_path / table / "x.parquet").write_text("nonsense")
    with pytest.raises(ReplayError, match=r"trajectories/x\.parquet is not a dataset's file: "):
        read_dataset(tmp_path, "2025-11")


async def test_a_live_window_is_played_as_far_as_recorded(store: Store, settings: Settings) -> None:
    await insert_real_window(store)
    report = await replay_report(
        partial(open_store, settings), settings.seed, WINDOW.id, "test-agent-4", "scripted:hold"
    )
    (result,) = report.results
    assert (result.prices, result.replayed_pnl) == ("seen", 0.0)
    assert any("only its first and last price are recorded" in line for line in report.missing)
