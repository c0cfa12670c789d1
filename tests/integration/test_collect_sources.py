"""Collecting from somebody else's database, from both writers, and from rows in any order."""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from babylon.core.artifacts import iter_artifact, read_artifact
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import read_trajectories
from babylon.migrations import VERSIONS
from babylon.stages.collect import GATEWAY_CALLS, TRAJECTORIES, collect_window
from babylon.stages.validate import validate_window
from babylon.store import game_tables, open_store
from babylon.store.call_partitions import make_partitions
from babylon.store.calls import insert_calls
from babylon.store.game_tables import batches_of_plays
from benchmarks.collect_rows import STEPS, fill, fill_others
from tests.faults.mutations import older_step
from tests.integration.game import WINDOW, claim, insert, insert_trajectories, real_rows
from tests.integration.test_collect import recorded
from tests.unit.quality.rows import call, compact, step, steps

DAY = timedelta(days=1)
GAME = (VERSIONS / "0001_game_tables.sql").read_text()
GAME_TABLES = ("User", "trajectories", "llm_call_logs", "market_outcomes")


async def everything(connection):
    """A digest of each of the game's tables."""
    return {
        table: await connection.fetchval(
            f'SELECT md5(string_agg(t::text, chr(10) ORDER BY t.id)) FROM "{table}" t'
        )
        for table in GAME_TABLES
    }


@pytest.fixture
async def reader(blank_database_url: str) -> AsyncIterator[tuple[asyncpg.Connection, str]]:
    """A live game's database, and the address of a role that may read its tables, no more, and
    owns schema babylon."""
    role = f"reader_{uuid4().hex}"
    game = await asyncpg.connect(blank_database_url)
    await game.execute(GAME)
    for name, table in zip(("users", *GAME_TABLES[1:]), GAME_TABLES, strict=True):
        await game.executemany(
            f'INSERT INTO "{table}" SELECT * FROM json_populate_record(NULL::"{table}", $1)',
            [(json.dumps(row),) for row in real_rows(name)],
        )
    await game.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'reader'; GRANT SELECT ON ALL TABLES IN SCHEMA public"
        f" TO {role}; CREATE SCHEMA babylon AUTHORIZATION {role}"
    )
    try:
        yield game, f"postgresql://{role}:reader@{blank_database_url.split('@')[1]}"
    finally:
        await game.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
        await game.close()


async def test_a_role_with_read_rights_collects_and_changes_nothing(reader, tmp_path):
    game, url = reader
    before = await everything(game)
    settings = load_settings(database={"url": url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        assert not store.game_tables_ours
        collected = await collect_window(store, settings.home, await claim(store), WINDOW)
        validated = await validate_window(store, settings, collected)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await store.pool.execute('UPDATE trajectories SET "usedInTraining" = true')
    assert (collected.artifact.rows, validated.agents) == (15, 5)
    assert await everything(game) == before


async def test_recorded_steps_reach_judge_and_table_byte_for_byte(store, settings):
    """Correctness is a column beside them, and so is what it pays."""
    bought = {"actionType": "BUY_SHARES", "parameters": {"marketId": "m1", "side": "YES"}}
    played = compact([step(n, action={**bought, "success": True}) for n in range(5)])
    await insert_trajectories(store, {"trajectoryId": "t1", "stepsJson": played})
    await store.pool.execute(
        'INSERT INTO market_outcomes (id, "windowId", "predictionMarketId", outcome)'
        " VALUES ('o', $1, 'm1', 'YES')",
        WINDOW.id,
    )
    validated = await validated_alone(store, settings)
    (row,) = read_artifact(settings.home, validated.artifact).to_dicts()
    digest = hashlib.sha256(played.encode()).hexdigest()
    assert hashlib.sha256(row["game_json"].encode()).hexdigest() == digest
    stored = await store.pool.fetchval('SELECT "stepsJson" FROM trajectories')
    assert hashlib.sha256(stored.encode()).hexdigest() == digest
    assert msgspec.json.decode(row["step_rewards_json"]) == [
        {"stepNumber": number, "reward": 1.0, "predictionCorrect": True} for number in range(5)
    ]
    assert (row["wins"], row["trades"]) == (5, 5)


async def test_few_large_trajectories_are_read_at_once(store, settings, monkeypatch):
    monkeypatch.setattr(game_tables, "_BATCH_BYTES", 2000)
    monkeypatch.setattr(game_tables, "_BATCH_ROWS", 3)
    lengths = {"a": 900, "b": 900, "c": 10, "d": 9000, "e": 10, "f": 10, "g": 10, "h": 10}
    texts = [{"trajectoryId": name, "stepsJson": "x" * length} for name, length in lengths.items()]
    await insert_trajectories(store, *texts)
    async with store.pool.acquire() as connection:
        batches = await batches_of_plays(connection, sorted(lengths))
    assert batches == [["a"], ["b", "c"], ["d"], ["e", "f", "g"], ["h"]]
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    parts = list(iter_artifact(settings.home, collected.artifact, ["trajectory_id"]))
    assert [part["trajectory_id"].to_list() for part in parts] == batches


async def validated_alone(store, settings):
    """The window, although few agents played."""
    windows = settings.windows.model_copy(update={"min_agents": 1})  # below the limit of settings
    few = settings.model_copy(update={"windows": windows})
    collected = await collect_window(store, few.home, await claim(store), WINDOW)
    return await validate_window(store, few, collected)


async def test_rows_of_both_writers_are_collected_and_the_unfinished_named(store, settings):
    older = [older_step(number) for number in range(5)]
    pending = older_step(5, action={"actionType": "pending", "success": False, "attemptId": ""})
    coordinator = [
        step(n, llmCalls=[], action={"actionType": "TRADING_DECISION", "success": True})
        for n in range(5)
    ]
    rows = {
        "recorder": {"stepsJson": compact(steps())},
        "older": {"windowId": None, "scenarioId": None, "stepsJson": compact(older)},
        "older, unfinished": {"windowId": None, "stepsJson": compact([*older, pending])},
        "coordinator": {"stepsJson": compact(coordinator)},
    }
    await insert_trajectories(store, *({"trajectoryId": name, **row} for name, row in rows.items()))
    validated = await validated_alone(store, settings)
    accepted = {t.trajectory_id: t for t in read_trajectories(settings.home, validated.artifact)}
    assert set(accepted) == {"recorder", "older"}
    assert accepted["older"].scenario_id == WINDOW.id
    assert validated.rejected == {"no_llm_call": 1, "unfinished_step": 1}


async def test_the_older_writers_calls_are_joined_by_its_steps_ids(store, settings):
    sent = [{"role": "user", "content": "the whole chat"}, {"role": "user", "content": "Trade?"}]
    played = [older_step(n, llmCalls=[call(callId=f"uuid-{n}")]) for n in range(5)]
    await insert_trajectories(
        store, {"trajectoryId": "t1", "windowId": None, "stepsJson": compact(played)}
    )
    log = real_rows("llm_call_logs")[0] | {"trajectoryId": "t1", "response": "HOLD", "topP": 0.5}
    await insert(
        store,
        "llm_call_logs",
        [
            {**log, "id": f"l{n}", "callId": f"uuid-{n}", "messagesJson": json.dumps(sent)}
            for n in reversed(range(4))
        ],
    )
    (trajectory,) = read_trajectories(
        settings.home, (await validated_alone(store, settings)).artifact
    )
    contents = [[message["content"] for message in one.messages] for one in trajectory.calls]
    assert contents == [["the whole chat", "Trade?"]] * 4 + [["You trade.", "Trade?"]]
    assert [one.top_p for one in trajectory.calls] == [0.5] * 4 + [1.0]


async def test_the_order_in_which_rows_were_written_makes_no_difference(store, settings):
    """Nor do repeated calls, calls of nobody, and numbers that JSON has no word for."""
    names = [f"t{n}" for n in range(5)]
    asked = [{"role": "system", "content": "You trade."}, {"role": "user", "content": "Trade?"}]
    log = real_rows("llm_call_logs")[0]
    log |= {"response": "HOLD", "topP": "NaN", "messagesJson": json.dumps(asked)}
    logs = [
        {**log, "id": i, "callId": i, "trajectoryId": name}
        for name in [*names, "nobody"]
        for i in (f"{name}-call-{n}-0" for n in range(5))
    ]
    calls = [
        recorded(name, n, "HOLD", asked, call_id=f"{name}/{n}/{attempt}")
        for name in [*names, "nobody"]
        for n in range(5)
        for attempt in range(2)
    ]
    artifacts = []
    for order in (1, -1):
        await store.pool.execute('TRUNCATE "User", trajectories, llm_call_logs, babylon.calls')
        await insert_calls(store, calls[::order])
        await insert(store, "llm_call_logs", logs[::order])
        rows = [{"trajectoryId": name, "stepsJson": compact(steps())} for name in names[::order]]
        await insert_trajectories(store, *rows)
        artifacts.append((await validated_alone(store, settings)).artifact)
    assert artifacts[0] == artifacts[1]
    trajectories = read_trajectories(settings.home, artifacts[0])
    assert [t.trajectory_id for t in trajectories] == names
    assert all(not c.retokenized for t in trajectories for c in t.calls)


async def test_a_late_row_is_in_the_next_artifact_and_the_first_stays(store, settings):
    await insert_trajectories(store, {"trajectoryId": "in time"})
    first = await collect_window(store, settings.home, await claim(store), WINDOW)
    await store.pool.execute(
        "INSERT INTO trajectories SELECT (jsonb_populate_record(t, $1)).* FROM trajectories t",
        {"id": "late", "trajectoryId": "late"},
    )
    second = await collect_window(store, settings.home, await claim(store), WINDOW)
    ids = [
        read_artifact(settings.home, one.artifact, ["trajectory_id"])["trajectory_id"].to_list()
        for one in (first, second)
    ]
    assert ids == [["in time"], ["in time", "late"]]


async def test_other_windows_are_found_by_index_however_many_rows_they_have(store):
    async with store.pool.acquire() as connection:
        await fill(connection, 20)
        await fill_others(connection, 5000)
        await connection.execute("ANALYZE")
        lines = await connection.fetch(f"EXPLAIN {TRAJECTORIES}", WINDOW.start, WINDOW.end, "{}")
    plan = "\n".join(line[0] for line in lines)
    assert "trajectories_startTime_idx" in plan
    assert "Seq Scan on trajectories" not in plan


async def test_the_benchmarks_rows_are_the_live_games(store, settings):
    async with store.pool.acquire() as connection:
        size = await fill(connection, 30)
    assert 60_000 < size / 30 < 70_000
    validated = await validated_alone(store, settings)
    trajectories = read_trajectories(settings.home, validated.artifact)
    assert (len(trajectories), validated.rejected) == (30, {})
    assert {len(trajectory.calls) for trajectory in trajectories} == {STEPS}
    real = [row["stepsJson"] for row in real_rows("trajectories")[:5]]
    ours = [row[0] for row in await store.pool.fetch('SELECT "stepsJson" FROM trajectories')]
    assert {shape(text) for text in ours} == {shape(text) for text in real}
    assert await packed(store, ours) == pytest.approx(await packed(store, real), rel=0.1)


def shape(text):
    """The spelling of the first trade, without what differs from one trade to the next."""
    trade = next(s for s in json.loads(text) if s["action"]["actionType"] != "HOLD")
    return re.sub(r'-?[\d.]+|(?<=:)"[^"]*"', "", compact(trade))


async def packed(store, texts):
    """The share of the texts that is left once Postgres has compressed them."""
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute("CREATE TEMP TABLE packed (text text) ON COMMIT DROP")
        await connection.executemany("INSERT INTO packed VALUES ($1)", [(one,) for one in texts])
        return await connection.fetchval(
            "SELECT sum(pg_column_size(text))::float8 / sum(octet_length(text)) FROM packed"
        )


async def test_partitions_of_days_before_the_window_are_not_searched_for_its_calls(store, settings):
    """A simulated window is played later than its own time, so calls of any later day are its."""
    name = real_rows("trajectories")[0]["trajectoryId"]
    await insert_trajectories(store, {"trajectoryId": name})
    hours = {"long before": -25, "day before": -23, "within": 0, "month later": 720}
    await insert_calls(
        store,
        [
            recorded(name, 0, "HOLD", [], call_id=one, started_at=WINDOW.start + timedelta(hours=h))
            for one, h in hours.items()
        ],
    )
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    (found,) = read_artifact(settings.home, collected.artifact, ["gateway_json"])["gateway_json"]
    assert [one["call_id"] for one in json.loads(found)] == ["day before", "within", "month later"]

    await make_partitions(store, datetime.now(UTC) + timedelta(days=12))
    since = datetime.now(UTC) + timedelta(days=11)
    plan = await store.pool.fetch(f"EXPLAIN {GATEWAY_CALLS}", [name], ["a"], since)
    searched = set(re.findall(r"Scan.* on (calls_\w+)", "\n".join(row[0] for row in plan)))
    assert searched == {f"calls_{since:%Y%m%d}", f"calls_{since + DAY:%Y%m%d}", "calls_other"}


async def test_a_trajectory_with_too_many_calls_is_rejected_and_costs_no_other(
    store, settings, monkeypatch, caplog
):
    """Postgres makes no JSON of 1 GiB: the window would fail each time, for all who played."""
    monkeypatch.setattr("babylon.store.calls.MOST_BYTES", 5000)
    await insert_trajectories(store, {"trajectoryId": "endless"}, {"trajectoryId": "sound"})
    said = [{"role": "user", "content": "x" * 1000}]
    played = [recorded("endless", 0, "HOLD", said, call_id=f"e{n}") for n in range(6)]
    played += [recorded("sound", 0, "HOLD", said, call_id=f"s{n}") for n in range(3)]
    # What another agent says of the trajectory does not count.
    played += [recorded("sound", 0, "HOLD", said, agent_id="other") for _ in range(6)]
    await insert_calls(store, played)
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    rows = read_artifact(settings.home, collected.artifact, ["trajectory_id", "gateway_json"])
    calls = {name: json.loads(text) for name, text in rows.iter_rows()}
    assert calls["endless"] is None
    assert [one["call_id"] for one in calls["sound"]] == ["s0", "s1", "s2"]
    assert "trajectory endless: its calls have 6" in caplog.text
    assert "trajectory sound" not in caplog.text
