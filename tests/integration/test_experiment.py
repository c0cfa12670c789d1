"""Experiments analysed from the rows that gateways and the game write."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest

from babylon.cli import main
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.evaluation.experiment.review import review
from babylon.evaluation.experiment.review_page import review_markdown
from babylon.evaluation.experiment.review_records import Comparison, Review
from babylon.store import Store, open_store
from babylon.store.experiments import find_experiment, plays
from tests.integration.experiments import HOURS, SALT, world
from tests.integration.test_migrations import GAME

AT_ONCE = {"experiment": {"min_hours": 0.0}}


def at_once(settings: Settings) -> Settings:
    return settings.replace(**AT_ONCE)


async def look(store: Store, settings: Settings, experiment: str | None = None) -> Review:
    rules = at_once(settings).experiment
    found = await review(store, settings.windows, rules, experiment)
    assert found is not None
    return found


def pnl(found: Review) -> Comparison:
    assert found.pnl is not None
    return found.pnl


async def test_a_better_challenger_is_promoted(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=400)
    await fleet.write()
    found = await look(store, settings)
    assert (found.decision, found.experiment, found.mode) == ("promote", SALT, "ab")
    assert (found.champion_version, found.challenger_version) == (0, 1)
    assert (found.agents.champion, found.agents.challenger, found.plays) == (30, 30, 180)
    assert pnl(found).low > 0 and pnl(found).difference == pytest.approx(400, abs=60)
    assert {guard.name: guard.state for guard in found.guardrails} == {
        "calls that broke off": "passes",
        "replies cut at their length limit": "passes",
        "failed actions": "passes",
        "plays that lost over a tenth of the balance": "passes",
        "latency, median": "passes",
        "latency, 95th percentile": "passes",
    }
    kept = await store.pool.fetch("SELECT * FROM babylon.experiment_reviews")
    assert [(row["salt"], row["decision"], row["reviewed_at"]) for row in kept] == [
        (SALT, "promote", found.reviewed_at)
    ]
    assert msgspec.convert(kept[0]["numbers"], Review) == found
    assert (await look(store, settings)).pnl == found.pnl
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.experiment_reviews") == 2


async def test_luck_that_the_challengers_share_in_an_hour_proves_nothing(
    store: Store, settings: Settings
) -> None:
    """They win or lose 150 together, and win in 11 of 20 hours."""
    fleet = await world(store)
    await fleet.begin()
    random = np.random.default_rng(0)
    together = random.permutation([150.0] * 11 + [-150.0] * 9)
    for number in range(400):
        luck = float(random.normal(0, 10))
        fleet.play(f"a{number % 50}", "champion", luck)
        fleet.play(f"b{number % 50}", "challenger", luck + float(together[number % HOURS]))
    await fleet.write()
    found = await look(store, settings)
    assert pnl(found).difference == pytest.approx(15)
    assert pnl(found).low + pnl(found).unseen < -30  # taken one by one, it would be above 0
    assert found.decision == "insufficient"
    assert "share in an hour is" in review_markdown(found)


async def test_an_experiment_is_compared_with_a_game_in_another_database(
    blank_database_url: str, settings: Settings
) -> None:
    game = await asyncpg.connect(blank_database_url)
    await game.execute(GAME)
    await game.close()
    apart = settings.replace(database={"game_url": blank_database_url})
    async with open_store(apart) as store:
        fleet = await world(store)
        await fleet.begin()
        fleet.fleet(gain=400)
        fleet.call("thief", "champion", trajectory_id="a0-0")  # another agent's
        fleet.call("a0", "challenger", trajectory_id="unwritten")
        await fleet.write()
        found = await look(store, apart)
        assert await store.pool.fetchval("SELECT count(*) FROM trajectories") == 0
    assert (found.decision, found.plays) == ("promote", 180)
    assert found.excluded == {"not finished or never written": 1}
    assert pnl(found).difference == pytest.approx(400, abs=60)


async def test_a_call_of_another_key_does_not_spoil_a_play(
    store: Store, settings: Settings
) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=400)
    await store.pool.execute("INSERT INTO babylon.plays VALUES ('a0-0', 'mine', 'a0')")
    fleet.call("a0", "pinned", trajectory_id="a0-0", agent_id=None, key_id="another")
    await fleet.write()
    found = await look(store, settings)
    assert (found.plays, found.excluded) == (180, {"calls for a pinned version": 1})


async def test_the_command_tells_the_same_and_succeeds_whatever_it_says(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def analyse(*arguments: str) -> tuple[int, str]:
        """Exit code, and what it prints."""
        with pytest.raises(SystemExit) as left:
            await asyncio.to_thread(main, ["deploy", "analyse", *arguments])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out or said.err

    monkeypatch.setattr("babylon.cli.signal.signal", lambda *_: None)  # not outside the main thread
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    fleet = await world(store)
    code, said = await analyse("--json")
    assert code == 1 and "no experiment runs" in json.loads(said)["error"]
    await fleet.begin()
    fleet.fleet(gain=400)
    await fleet.write()
    code, said = await analyse("--json")
    numbers = json.loads(said)
    assert (code, numbers["decision"]) == (0, "insufficient")
    assert "AB_MIN_HOURS=3" in numbers["reason"]
    assert numbers["pnl"] == asdict(pnl(await look(store, settings)))
    await fleet.end(winner=1)
    assert (await analyse())[0] == 1
    code, said = await analyse("--experiment", SALT)
    assert code == 0 and said.startswith(f"# Experiment {SALT}: not enough evidence yet")
    code, said = await analyse("--experiment", "no-such")
    assert code == 1 and "no experiment 'no-such'" in said


async def test_a_challenger_that_loses_is_rolled_back(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=-200)
    await fleet.write()
    assert (await look(store, settings)).decision == "rollback"


async def test_earlier_history_narrows_the_interval(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    for number in range(60):
        for _ in range(3):
            fleet.row(f"a{number}", f"old-{len(fleet.plays)}", 30.0 * number)
    await fleet.write()
    await store.pool.execute(
        'UPDATE trajectories SET "createdAt" = "createdAt" - interval \'1 hour\''
    )
    await fleet.begin()
    await store.pool.execute("UPDATE babylon.routes SET created_at = now()")
    for number in range(60):
        arm = "challenger" if number % 2 else "champion"
        fleet.play(f"a{number}", arm, 30.0 * number + number % 7)
    await fleet.write()
    old = settings.replace(windows={"lookback_hours": 100 * 366 * 24})
    found = await look(store, old)
    assert found.raw_pnl is not None
    assert pnl(found).explained > 0.99
    ours, raw = pnl(found), found.raw_pnl  # the low ends allow for losses that nobody saw, too
    assert ours.high - ours.difference < (raw.high - raw.difference) / 10
    beyond = await look(store, settings)  # 168 h: this history is of 2025
    assert pnl(beyond).explained == 0


async def test_the_experiments_own_play_is_never_history(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=0)
    await fleet.write()
    found = await look(store, settings.replace(windows={"lookback_hours": 100 * 366 * 24}))
    assert found.pnl is not None and found.pnl == found.raw_pnl


async def test_play_belongs_to_its_first_stage(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin(0.25, mode="canary")
    long = fleet.play("a0", "champion", 5)
    await fleet.begin(0.5, mode="canary")
    fleet.call("a0", "champion", trajectory_id=long)
    short = fleet.play("a1", "challenger", 5)
    await fleet.write()
    experiment = await find_experiment(store)
    assert experiment is not None
    async with store.pool.acquire() as connection:
        found = {
            play.trajectory_id: play for play in await plays(connection, connection, experiment)
        }
    assert (found[long].stage, found[long].mixed) == (0, False)
    assert found[short].stage == 1


async def test_play_outside_of_one_arm_is_excluded(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    fleet.route = 1
    straddling = fleet.play("a0", "champion", 9e6)
    await fleet.begin()
    fleet.fleet(gain=0, agents=10, plays=1)
    fleet.call("a0", "champion", trajectory_id=straddling)
    mixed = fleet.play("a1", "champion", 9e6)
    fleet.call("a1", "challenger", trajectory_id=mixed)
    named = fleet.play("a2", "challenger", 9e6)
    fleet.call("a2", "pinned", trajectory_id=named)
    fleet.play("a3", "pinned", 9e6)
    fleet.play("a4", "challenger", 9e6, isEvaluation=True)
    fleet.call("a5", "champion", trajectory_id="still-playing")
    now = datetime.now(UTC).replace(tzinfo=None)
    fleet.play("a0", "challenger", 9e6, startTime=now.isoformat())
    fleet.play("a1", "champion", 9e6, finalPnL="NaN")
    fleet.play("a1", "challenger", 1e100)  # one agent's number must not end the review
    fleet.play("a1", "challenger", 5, stepsJson='[{"environmentState":{"agentPnL":1e999}}]')
    await fleet.write()
    found = await look(store, settings)
    assert found.plays == 10
    assert found.excluded == {
        "mixed arms, or partly outside of the experiment": 3,
        "evaluation": 1,
        "not finished or never written": 1,
        "window not over": 1,
        "no P&L": 3,
        "calls for a pinned version": 2,
    }
    assert abs(pnl(found).difference) < 1000
    assert found.crossed == 2  # a0 and a1
    assert (found.decision, found.agents.champion, found.agents.challenger) == (
        "insufficient",
        5,
        5,
    )


async def test_calls_that_name_anothers_play_are_ignored(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=0, agents=8, plays=1)
    await fleet.write()
    before = await look(store, settings)
    for number in range(8):
        for arm in ("champion", "challenger"):
            fleet.call("stranger", arm, trajectory_id=f"a{number}-{number}")
    await fleet.write()
    after = await look(store, settings)
    assert (after.pnl, after.plays, after.excluded) == (before.pnl, 8, before.excluded)


async def test_profit_is_of_the_play_in_every_row_form(store: Store, settings: Settings) -> None:
    """Last known lifetime P&L less that of the first step, be it behind 5,000 characters."""
    fleet = await world(store)
    await fleet.begin()
    deep = json.dumps(
        [
            {
                "stepNumber": number,
                "observation": {"environmentState": {"agentPnL": 1e9}, "text": "x" * 5000},
                "environmentState": {"agentPnL": 10 + number, "open": {"nested": 1}},
                "llmCalls": [],
                "action": {"actionType": "HOLD", "success": True},
            }
            for number in range(3)
        ]
    )
    for agent, arm in (("a", "champion"), ("b", "champion"), ("c", "challenger")):
        fleet.play(agent, arm, 5)
    fleet.play("d", "challenger", 0, stepsJson=deep, finalPnL=15.0)
    fleet.play("e", "challenger", 0, finalPnL=None, metricsJson='{"finalPnL":75}')
    fleet.play("f", "champion", 0, stepsJson=deep, finalPnL=None, metricsJson="{}")  # 12 - 10
    fleet.play("g", "champion", 0, stepsJson="[", finalPnL=15.0, metricsJson="{")
    fleet.play("h", "champion", 4)
    fleet.play("i", "challenger", 5)
    await fleet.write()
    found = pnl(await look(store, settings))
    assert (found.champion, found.challenger) == pytest.approx((4, 5))


async def test_agents_count_in_their_first_arm_of_share(store: Store, settings: Settings) -> None:
    """All earn 10 more at the second share: more challengers then, and yet no difference."""
    fleet = await world(store)
    shares = (0.25, 0.5)
    for stage, share in enumerate(shares):
        await fleet.begin(share, mode="canary")
        for number in range(48):
            arm = "challenger" if number / 48 < share else "champion"
            for luck in (-1.0, 1.0):
                fleet.play(f"a{number}", arm, 10.0 * stage + luck * (number % 3))
    await fleet.write()
    found = await look(store, settings)
    assert (found.mode, found.shares, found.crossed) == ("canary", shares, 12)
    assert (found.agents.champion, found.agents.challenger) == (36, 12)
    assert found.agents.expected == pytest.approx(12)
    assert pnl(found).difference == pytest.approx(0, abs=1e-6)
    assert pnl(found).challenger_agents == 24


async def test_play_that_goes_on_at_another_share_says_nothing_of_the_arm_there(
    store: Store, settings: Settings
) -> None:
    """Busy agents earn 50 more, whoever answers. They are in the midst of a play at the change."""
    fleet = await world(store)
    shares, open_plays = (0.25, 0.5), []
    for stage, share in enumerate(shares):
        await fleet.begin(share, mode="canary")
        for agent, name, arm in open_plays:
            fleet.call(agent, arm, trajectory_id=name)
        for number in range(48):
            arm = "challenger" if number / 48 < share else "champion"
            busy = number % 2
            for luck in (-1.0, 1.0):
                name = fleet.play(f"a{number}", arm, 50.0 * busy + luck * (number % 3))
            open_plays += [(f"a{number}", name, arm)] if busy and not stage else []
    await fleet.write()
    found = await look(store, settings)
    assert pnl(found).difference == pytest.approx(0, abs=1e-6)
    assert (found.decision, found.crossed, pnl(found).challenger_agents) == ("insufficient", 12, 24)


async def test_a_broken_sample_ratio_promotes_nobody(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=2000, agents=80, every=8)
    await fleet.write()
    found = await look(store, settings)
    assert pnl(found).low > 0
    assert found.decision == "insufficient"
    assert "sample ratio broken: 10 challengers of 80 agents, 40.0 expected" in found.reason


async def test_agents_lost_by_one_arm_break_the_ratio(store: Store, settings: Settings) -> None:
    """All call, but of the challenger's only those finish that earn."""
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=0, agents=120, plays=2)
    fleet.plays = [
        row
        for row in fleet.plays
        if int(row["agentId"][1:]) % 2 or int(row["agentId"][1:]) % 8 == 0
    ]
    await fleet.write()
    found = await look(store, settings)
    assert not found.agents.broken and found.measured_agents.broken
    assert found.decision == "insufficient" and "15 challengers of 75" in found.reason


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("calls that broke off", {"finish_reason": "interrupted"}),
        ("replies cut at their length limit", {"finish_reason": "length"}),
        ("latency, median", {"latency_ms": 900}),
    ],
)
async def test_a_challenger_that_breaks_a_guardrail_is_rolled_back_however_it_earns(
    store: Store, settings: Settings, name: str, fault: dict[str, Any]
) -> None:
    """Long before there is any finished play."""
    fleet = await world(store)
    await fleet.begin()
    for number in range(40):
        challenger = number % 2 == 0
        for _ in range(3):
            arm = "challenger" if challenger else "champion"
            fleet.call(f"a{number}", arm, trajectory_id=None, **(fault if challenger else {}))
    await fleet.write()
    found = await look(store, settings)
    states = {guard.name: guard.state for guard in found.guardrails}
    assert states[name] == "broken"
    assert found.decision == "rollback" and name in found.reason
    assert found.pnl is None


async def test_a_judged_score_is_told_and_decides_nothing(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=0)
    await fleet.write()
    await store.pool.execute(
        "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score)"
        " SELECT 'w', \"trajectoryId\", 'judge', CASE WHEN substr(\"agentId\", 2)::int % 2 = 0"
        " THEN 0.9 ELSE 0.1 END FROM trajectories"
    )
    found = await look(store, settings)
    assert found.score is not None and found.score.difference == pytest.approx(0.8)
    assert found.decision == "insufficient"


async def test_a_new_salt_is_a_new_experiment(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    assert await review(store, settings.windows, settings.experiment) is None
    await fleet.begin(0.1, mode="canary")
    await fleet.begin(0.1, mode="canary")
    await fleet.begin(0.2, mode="canary")
    await fleet.end(winner=0)
    await fleet.begin(salt="another")
    first, second = await find_experiment(store, SALT), await find_experiment(store)
    assert first is not None and second is not None
    assert (first.stages, first.shares) == (((2, 3), (4,)), (0.1, 0.2))
    assert first.ended_at is not None and second.ended_at is None
    assert (second.salt, second.stages) == ("another", ((6,),))


async def test_read_rights_on_game_tables_suffice(blank_database_url: str, tmp_path: Path) -> None:
    connection = await asyncpg.connect(blank_database_url)
    await connection.execute(GAME)
    await connection.close()
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        assert not store.game_tables_ours
        fleet = await world(store)
        await fleet.begin()
        fleet.fleet(gain=400)
        await fleet.write()
        await store.pool.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        try:
            await store.pool.execute(
                "GRANT USAGE ON SCHEMA babylon, public TO reader;"
                "GRANT ALL ON ALL TABLES IN SCHEMA babylon TO reader;"
                "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"
            )
            url = "postgresql://reader:reader@" + blank_database_url.split("@")[1]
            async with open_store(load_settings(database={"url": url}, home=tmp_path)) as reader:
                assert (await look(reader, settings)).decision == "promote"
        finally:
            await store.pool.execute("DROP OWNED BY reader; DROP ROLE reader")


async def test_all_rows_of_the_pages_tables_are_complete(store: Store, settings: Settings) -> None:
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=600, agents=44)
    fleet.play("a1", "pinned", 0)
    await fleet.write()
    page = review_markdown(await look(store, settings))
    assert "lower, for a loss that is too rare to have been seen." in page
    assert page.startswith(f"# Experiment {SALT}: promote the challenger\n")
    assert "| agents | 22 | 22 | 22.0 challengers expected, p = 1: as split |" in page
    assert "Left out: calls for a pinned version 1." in page
    assert "move each other's prices" in page
    widths = [{row.count("|") for row in table} for table in _tables(page)]
    assert widths == [{5}, {7}]


def _tables(page: str) -> Iterator[list[str]]:
    for block in page.split("\n\n"):
        if block.startswith("|"):
            yield block.splitlines()
