"""Traces of other systems into the database and out again."""

import json
import os
from datetime import UTC
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from babylon.core.errors import DatabaseError, WindowError
from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.core.windows import parse_window_id, window_at
from babylon.formats.atif import write_atif
from babylon.formats.export_files import export_game, export_traces, read_window_traces
from babylon.formats.format_names import Format, Written
from babylon.formats.import_files import import_files
from babylon.formats.staging import Staging
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.stages.collect import collect_window
from babylon.stages.validate import validate_window
from babylon.store import Store, open_store
from babylon.store.published import withhold
from tests.conftest import CAPTURED, REAL_ROWS, real_rows
from tests.integration.experiments import world
from tests.integration.game import WINDOW as REAL
from tests.integration.game import insert_real_window
from tests.integration.test_migrations import GAME
from tests.unit.formats.spans import Traced
from tests.unit.formats.test_spans import chat, llm
from tests.unit.formats.traces import NOON, call, step, tokens, trace, write_lines

WINDOW = parse_window_id("2025-11-14T12:00")
TABLES = ("trajectories", "llm_call_logs", "babylon.calls")


async def counts(store: Store) -> list[int]:
    return [await store.pool.fetchval(f"SELECT count(*) FROM {table}") for table in TABLES]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def a_trace(name: str = "t1", **changes: Any) -> Any:
    steps = [step(i, call(f"tick {i}"), tokens={0: tokens()} if i else {}) for i in range(5)]
    return trace(*steps, trajectory_id=name, **changes)


async def test_atif_keeps_exact_tokens(store: Store, settings: Settings, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", write_atif(a_trace()), write_atif(a_trace("t2")))
    added = await import_files(store, [file])
    assert added == {"User": 1, "trajectories": 2, "llm_call_logs": 10, "babylon.calls": 8}
    assert set((await import_files(store, [file])).values()) == {0}
    windows = settings.windows.model_copy(update={"min_agents": 1})  # below the limit of settings
    one = settings.model_copy(update={"windows": windows})
    from babylon.store.windows import claim_window

    held = await claim_window(store, WINDOW, owner="test", lease_s=60)
    collected = await collect_window(store, one.home, held, WINDOW)
    validated = await validate_window(store, one, collected)
    for trajectory in read_trajectories(settings.home, validated.artifact):
        assert [c.retokenized for c in trajectory.calls] == [True] + [False] * 4
        exact = trajectory.calls[1]
        assert (exact.prompt_token_ids, exact.completion_token_ids) == ((1, 2, 3), (4, 5))
        assert (exact.logprobs, exact.policy_version) == ((-0.5, -0.25), 3)
        assert (trajectory.pnl_usd, trajectory.actions) == (11.5, 5)


@pytest.mark.parametrize("format", [Written.ATIF, Written.CHAT])
async def test_a_window_comes_back_unchanged(store: Store, tmp_path: Path, format: Written) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    await import_files(store, [write_lines(tmp_path / "in.jsonl", write_atif(a_trace()))])
    assert await export_traces(store, WINDOW, format, first) == (1 if format is Written.ATIF else 5)
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs, babylon.calls")
    await import_files(store, [first])
    await export_traces(store, WINDOW, format, second)
    assert lines_of(first) == lines_of(second)


async def test_replies_that_must_not_be_trained_on_stay_so_and_are_no_targets(
    store: Store, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await import_files(store, [write_lines(tmp_path / "in.jsonl", write_atif(a_trace()))])
    forced = "UPDATE babylon.calls SET trainable = false, untrainable_reason = 'prefilled'"
    await store.pool.execute(f"{forced} WHERE step_number = 1")
    endless = "UPDATE babylon.calls SET logprobs = '{-Infinity,-1}' WHERE step_number = 2"
    await store.pool.execute(endless)
    assert await export_traces(store, WINDOW, Written.CHAT, tmp_path / "sft.jsonl") == 3
    assert "left out: 2 replies that were not sampled from the policy alone" in caplog.text
    said = [line["messages"][1]["content"] for line in lines_of(tmp_path / "sft.jsonl")]
    assert said == ["tick 0", "tick 3", "tick 4"]
    await export_traces(store, WINDOW, Written.ATIF, tmp_path / "a.jsonl")
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs, babylon.calls")
    await import_files(store, [tmp_path / "a.jsonl"])
    query = "SELECT untrainable_reason FROM babylon.calls ORDER BY step_number"
    reasons = [row[0] for row in await store.pool.fetch(query)]
    assert reasons == ["prefilled", "a logprob is not finite", None, None]
    await export_traces(store, WINDOW, Written.ATIF, tmp_path / "b.jsonl")
    assert lines_of(tmp_path / "a.jsonl") == lines_of(tmp_path / "b.jsonl")
    from babylon.store.windows import claim_window

    windows = settings.windows.model_copy(update={"min_agents": 1})  # below the limit of settings
    one = settings.model_copy(update={"windows": windows})
    held = await claim_window(store, WINDOW, owner="test", lease_s=60)
    collected = await collect_window(store, one.home, held, WINDOW)
    validated = await validate_window(store, one, collected)
    (trajectory,) = read_trajectories(settings.home, validated.artifact)
    told = [call.untrainable for call in trajectory.calls]
    assert told == [None, "prefilled", "a logprob is not finite", None, None]


@pytest.mark.parametrize("format", [Written.ATIF, Written.CHAT])
async def test_what_was_taken_down_is_not_written(
    store: Store, tmp_path: Path, format: Written
) -> None:
    traces = [a_trace(), a_trace("t2"), a_trace("t3", agent_id="gone")]
    await import_files(store, [write_lines(tmp_path / "in.jsonl", *map(write_atif, traces))])
    await withhold(store, "trajectory", "t2", "asked")
    await withhold(store, "agent", "gone", "asked")
    await export_traces(store, WINDOW, format, tmp_path / "out")
    text = (tmp_path / "out").read_text()
    assert '"t1"' in text and '"t2"' not in text and "gone" not in text


@pytest.mark.parametrize(("kind", "name"), [("agent", "ann"), ("trajectory", "t-ann")])
async def test_play_that_shows_what_was_taken_down_is_not_written(
    store: Store, tmp_path: Path, kind: str, name: str
) -> None:
    traces = [a_trace(f"t-{one}", agent_id=one) for one in ("ann", "bo", "cy")]
    await import_files(store, [write_lines(tmp_path / "in.jsonl", *map(write_atif, traces))])
    await store.pool.execute(
        """UPDATE trajectories SET "stepsJson" = jsonb_set("stepsJson"::jsonb,"""
        """ '{0,environmentState,market}', '{"game": {"players": ["ann", "bo"]}}')::text"""
        """ WHERE "agentId" <> 'cy'"""
    )
    await withhold(store, kind, name, "asked")
    left = [trace.agent_id async for trace in read_window_traces(store, WINDOW)]
    assert left == ["cy"]


def _generation(number: int) -> dict[str, Any]:
    return {
        "id": f"g{number}", "traceId": f"t{number}", "sessionId": "s", "type": "GENERATION",
        "startTime": f"2025-11-14T12:00:0{number}Z", "input": "hi", "output": "hello",
    }  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
async def test_a_session_over_two_files_is_left_out_whole_and_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    first = write_lines(tmp_path / "1.jsonl", *map(_generation, (0, 1)))
    second = write_lines(tmp_path / "2.jsonl", *map(_generation, (2, 3, 4)))
    if not together:
        assert "left_out" not in await import_files(store, [first])
    added = await import_files(store, [first, second])
    assert added["left_out"] == 1
    assert (
        f"left out: {second}:1: trajectory 's' is stored already, with other calls" in caplog.text
    )
    assert await counts(store) == [1, 2, 0]  # no log without its trajectory
    caplog.clear()
    part = write_lines(tmp_path / "3.jsonl", _generation(1))
    assert "left_out" not in await import_files(store, [first, part])  # nothing of it is lost


async def test_tokens_of_a_trajectory_that_is_left_out_are_left_out_too(
    store: Store, tmp_path: Path
) -> None:
    longer = [step(i, call(f"other {i}", "x"), tokens={0: tokens()}) for i in range(7)]
    rows = [write_atif(a_trace()), write_atif(trace(*longer))]
    added = await import_files(store, [write_lines(tmp_path / "in.jsonl", *rows)])
    assert (added["left_out"], await counts(store)) == (1, [1, 5, 4])


async def test_calls_beside_a_game_in_another_database_are_written(
    blank_database_url: str, settings: Settings, tmp_path: Path
) -> None:
    game = await asyncpg.connect(blank_database_url)
    await game.execute(GAME)
    await game.close()
    async with open_store(settings.replace(database={"game_url": blank_database_url})) as store:
        fleet = await world(store)
        await fleet.begin()
        fleet.play("ann", "champion", 1.0)
        await fleet.write()
        written = await export_game(store, REAL, tmp_path / "game")
    assert written == {
        "users": 1, "trajectories": 1, "llm_call_logs": 0, "market_outcomes": 0, "calls": 1
    }  # fmt: skip


async def test_logs_and_tokens_of_a_game_row_that_is_left_out_are_left_out_too(
    store: Store, tmp_path: Path
) -> None:
    """The game goes on after a first export of its rows, and exports them again."""
    longer = [step(i, call(f"tick {i}"), tokens={0: tokens()} if i else {}) for i in range(7)]
    rows = [write_atif(trace(*longer)), write_atif(a_trace("t2"))]
    await import_files(store, [write_lines(tmp_path / "longer.jsonl", *rows)])
    await export_game(store, WINDOW, tmp_path / "game")
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs, babylon.calls")
    await import_files(store, [write_lines(tmp_path / "in.jsonl", write_atif(a_trace()))])
    added = await import_files(store, sorted((tmp_path / "game").iterdir()))
    assert (added["left_out"], await counts(store)) == (1, [2, 10, 8])


async def test_game_rows_keep_all_columns(store: Store, settings: Settings, tmp_path: Path) -> None:
    plan = FleetPlan(start=REAL.start.replace(hour=10), duration_min=6, agents=3, fleet_id="f")
    await run_fleet(store, settings, plan, "scripted")
    await import_files(store, [write_lines(tmp_path / "x.jsonl", write_atif(
        a_trace(start=plan.start, window_id=None, steps=tuple(
            msgspec.structs.replace(s, at=None) for s in a_trace().steps))))])  # fmt: skip
    folder, again = tmp_path / "first", tmp_path / "second"
    written = await export_game(store, parse_window_id("2025-11-14T10:00"), folder)
    assert written == {
        "users": 3, "trajectories": 4, "llm_call_logs": 23, "market_outcomes": 3, "calls": 4
    }  # fmt: skip
    await store.pool.execute(
        'TRUNCATE "User", trajectories, llm_call_logs, market_outcomes, babylon.calls'
    )
    await import_files(store, sorted(folder.iterdir()))
    await export_game(store, parse_window_id("2025-11-14T10:00"), again)
    for file in folder.iterdir():
        assert file.read_text() == (again / file.name).read_text(), file.name


async def test_ground_truth_stays_at_home(store: Store, tmp_path: Path) -> None:
    secret = "SECRET"
    await insert_real_window(store)
    await store.pool.execute("UPDATE market_outcomes SET question = $1, outcome = $1", secret)
    await store.pool.execute(
        'UPDATE trajectories SET "metadataJson" = $1, "stepsJson" = replace("stepsJson", $2, $3)',
        json.dumps({"gameKnowledge": {"futureOutcomes": {"m1": secret}}}),
        '"success":true',
        f'"success":true,"correctness":{{"actualOutcome":"{secret}"}}',
    )
    steps = 'SELECT count(*) FROM trajectories WHERE "stepsJson" LIKE $1'
    assert await store.pool.fetchval(steps, f"%{secret}%") > 0
    for format in (Written.ATIF, Written.CHAT):
        await export_traces(store, REAL, format, tmp_path / format)
        assert secret not in (tmp_path / format).read_text()


async def test_real_rows_are_written_and_read_again(store: Store, tmp_path: Path) -> None:
    await insert_real_window(store)
    written = await export_traces(store, REAL, Written.ATIF, tmp_path / "a.jsonl")
    before = await counts(store)
    assert await import_files(store, [tmp_path / "a.jsonl"]) == {
        "User": 0, "trajectories": 0, "llm_call_logs": 0
    }  # fmt: skip
    assert await counts(store) == before and written > 5
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs")
    await import_files(store, [tmp_path / "a.jsonl"])
    assert (await counts(store))[0] == written


async def test_spans_become_trajectories_of_one_window(store: Store, tmp_path: Path) -> None:
    exports = []
    for attributes in (chat("hi", "hello"), llm("hi", "hello")):
        traced = Traced()
        traced.span("llm", attributes)
        exports.append(traced.export())
    files = [write_lines(tmp_path / f"{i}.json", export) for i, export in enumerate(exports)]
    added = await import_files(store, files)
    assert added == {"User": 1, "trajectories": 2, "llm_call_logs": 2}
    rows = await store.pool.fetch('SELECT "windowId", "agentId", "startTime" FROM trajectories')
    assert {(row["windowId"], row["agentId"]) for row in rows} == {(WINDOW.id, "shop")}
    assert {row["startTime"] for row in rows} == {NOON.replace(tzinfo=None)}


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


async def test_a_chat_without_times_goes_where_it_is_told(store: Store, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sft.jsonl", CHAT)
    with pytest.raises(DatabaseError, match=r"sft\.jsonl:1: .* has no time: pass --window ID"):
        await import_files(store, [file])
    await import_files(store, [file], window=WINDOW, agent_id="teacher")
    row = await store.pool.fetchrow("SELECT * FROM trajectories")
    assert row is not None
    assert (row["windowId"], row["agentId"], row["finalPnL"]) == (WINDOW.id, "teacher", None)


async def test_what_other_systems_captured_is_stored_and_written_again(
    store: Store, tmp_path: Path
) -> None:
    """Sixteen calls with their tool calls and rewards; the calls that failed are left out."""
    files = [path for path in sorted(CAPTURED.iterdir()) if path.name != "langfuse-blob.jsonl"]
    added = await import_files(store, files, window=WINDOW)
    assert added == {"User": 3, "trajectories": 9, "llm_call_logs": 16, "left_out": 7}
    assert await import_files(store, files, window=WINDOW) == {
        "User": 0, "trajectories": 0, "llm_call_logs": 0, "left_out": 7,
    }  # fmt: skip
    rewards = await store.pool.fetch('SELECT "totalReward" FROM trajectories ORDER BY 1 DESC')
    assert [row[0] for row in rewards[:3]] == [1.0, 1.0, 0.0]
    assert await export_traces(store, WINDOW, Written.CHAT, tmp_path / "sft.jsonl") == 16
    lines = lines_of(tmp_path / "sft.jsonl")
    asked = [line for line in lines if line["messages"][-1].get("tool_calls")]
    assert len(asked) == 8
    assert {line["metadata"]["reward"] for line in lines} == {0.0, 0.25, 0.75}
    path = tmp_path / "sft.jsonl"
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs")
    assert (await import_files(store, [path]))["llm_call_logs"] == 16


async def test_a_bad_line_is_left_out_and_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_lines(tmp_path / "sft.jsonl", CHAT, {"messages": []})
    added = await import_files(store, [file], window=WINDOW)
    assert added == {"User": 1, "trajectories": 1, "llm_call_logs": 1, "left_out": 1}
    assert f"left out: {file}:2: messages is not a non-empty list" in caplog.text


def _line(**metadata: object) -> dict[str, Any]:
    return {**CHAT, "metadata": {"trajectory_id": "t", "agent_id": "a", "step": 0, **metadata}}


def _sampled(**changes: Any) -> dict[str, Any]:
    return write_atif(trace(step(0, call("?"), tokens={0: tokens(**changes)})))


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (CHAT, _line(max_tokens=2**31), "max_tokens is 2147483648"),
        (CHAT, _line(scenario_id="s" * 101), "is longer than 100 characters"),
        (CHAT, _line(at="0001-01-01T00:00:00Z"), "time 0001-01-01 00:00:00"),
        (write_atif(a_trace("t2")), _sampled(policy_version=2**31), "policy_version is 2147483648"),
        (write_atif(a_trace("t2")), _sampled(seed=2**63), "seed is 9223372036854775808: give"),
        (write_atif(a_trace("t2")), _sampled(route_version=2**70), "of at most 64 bits"),
    ],
)
async def test_what_no_column_holds_is_left_out_and_named(
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    good: dict[str, Any],
    bad: dict[str, Any],
    message: str,
) -> None:
    added = await import_files(
        store, [write_lines(tmp_path / "in.jsonl", good, bad)], window=WINDOW
    )
    assert (added["trajectories"], added["left_out"]) == (1, 1)
    assert message in caplog.text


async def test_logprobs_that_float4_cannot_hold_are_rounded(store: Store, tmp_path: Path) -> None:
    odd = _sampled(logprobs=(-1e-50, -1e39), seed=2**40)
    added = await import_files(store, [write_lines(tmp_path / "in.jsonl", odd)])
    assert added["babylon.calls"] == 1
    assert await store.pool.fetchval("SELECT logprobs FROM babylon.calls") == [0.0, float("-inf")]


@pytest.mark.parametrize(
    "fields",
    [
        {"action": {"parameters": None}},
        {"action": {"parameters": ["m1"]}},
        {"action": {"error": {"code": 7}, "reasoning": 1}},
        {"reward": "none"},
        {"call": {"maxTokens": None, "latencyMs": 1.5}},
    ],
)
async def test_a_step_with_fields_of_other_types_comes_back(
    store: Store, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Validation reads none of these fields, so a game may write anything there."""
    await insert_real_window(store)
    rows = await store.pool.fetch(
        'SELECT "trajectoryId" AS id, "stepsJson" AS steps FROM trajectories'
    )
    for row in rows:
        steps = json.loads(row["steps"])
        steps[0]["action"] |= fields.get("action", {})
        steps[0] |= {name: value for name, value in fields.items() if name == "reward"}
        for one in steps[0]["llmCalls"]:
            one |= fields.get("call", {})
        change = 'UPDATE trajectories SET "stepsJson" = $1 WHERE "trajectoryId" = $2'
        await store.pool.execute(change, json.dumps(steps), row["id"])
    await export_traces(store, REAL, Written.ATIF, tmp_path / "a.jsonl")
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs")
    added = await import_files(store, [tmp_path / "a.jsonl"])
    assert "left_out" not in added and added["trajectories"] == len(rows)


@pytest.mark.parametrize("minutes", [15, 30, 240])
@pytest.mark.parametrize("format", [Written.ATIF, Written.CHAT])
async def test_rows_of_the_game_s_hours_come_back_in_windows_of_another_length(
    store: Store, tmp_path: Path, minutes: int, format: Written
) -> None:
    await insert_real_window(store)
    starts = await store.pool.fetch('SELECT "startTime" FROM trajectories')
    windows = {window_at(row["startTime"].replace(tzinfo=UTC), minutes) for row in starts}
    files = [tmp_path / f"{number}.jsonl" for number, _ in enumerate(windows)]
    for window, file in zip(windows, files, strict=True):
        await export_traces(store, window, format, file)
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs")
    added = await import_files(store, files, format=Format(format), minutes=minutes)
    assert "left_out" not in added and added["trajectories"] >= 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"messages": []}, r"sft\.jsonl:1: messages is not a non-empty list"),
        ({**CHAT, "metadata": {"trajectory_id": "t", "agent_id": "a", "step": 0,
          "window_id": "2025-11-14T08:00", "at": "2025-11-14T09:00:00Z"}},
         r"sft\.jsonl:1: .* outside its window 2025-11-14T08:00: set WINDOW_MINUTES .now 60"),
    ],
)  # fmt: skip
async def test_a_file_without_one_good_line_is_refused_and_nothing_is_imported(
    store: Store, tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    game = Path(__file__).parents[1] / "data" / "babylon" / "users.jsonl"
    file = write_lines(tmp_path / "sft.jsonl", {"messages": []}, bad)
    with pytest.raises(DatabaseError, match=r"none of 2 items can be imported; the first: .*:1: "):
        await import_files(store, [game, file], window=WINDOW)
    file = write_lines(tmp_path / "sft.jsonl", bad)
    with pytest.raises(DatabaseError, match=message):
        await import_files(store, [game, file], window=WINDOW)
    assert await counts(store) == [0, 0, 0]
    assert await store.pool.fetchval('SELECT count(*) FROM "User"') == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "s", "traceId": "t", "name": "won", "value": 1}',  # a score, its call elsewhere
        '{"id": "r", "run_type": "chain", "start_time": "2025-11-14T12:00:00Z"}',
    ],
)
async def test_a_file_without_a_call_is_refused_by_name(
    store: Store, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text(text)
    with pytest.raises(DatabaseError, match=r"scores\.jsonl holds no call of a model"):
        await import_files(store, [file])


@pytest.mark.parametrize("format", [Format.CHAT, None])
async def test_a_pipe_which_can_be_read_only_once_is_refused(
    store: Store, tmp_path: Path, format: Format | None
) -> None:
    os.mkfifo(pipe := tmp_path / "sft.jsonl")
    with pytest.raises(DatabaseError, match=r"sft\.jsonl is read more than once: write it"):
        await import_files(store, [pipe], format=format, window=WINDOW)


@pytest.mark.parametrize("game_first", [True, False])
async def test_an_agent_may_have_the_name_of_a_user_of_the_game(
    store: Store, tmp_path: Path, game_first: bool
) -> None:
    """Names are unique in the game's table, and so are ids: neither import may lose its users."""
    user = real_rows("users")[0]
    chats = write_lines(tmp_path / "sft.jsonl", CHAT)
    order = [REAL_ROWS / "users.jsonl", chats][:: 1 if game_first else -1]
    for file in order:
        await import_files(store, [file], window=WINDOW, agent_id=user["username"])
    assert user["username"] != user["id"]
    known = 'SELECT count(*) FROM "User" WHERE id = ANY($1)'
    assert await store.pool.fetchval(known, [user["id"], user["username"]]) == 2


async def test_rows_of_long_conversations_are_staged_a_few_at_a_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has the prompts before it: a hundred traces of a small file may fill the memory."""
    sizes: list[int] = []
    copy = Staging._copy

    async def counted(own: Staging, connection: Any, table: str, rows: Any) -> None:
        sizes.append(sum(len(str(value)) for row in rows for value in row.value.values()))
        await copy(own, connection, table, rows)

    monkeypatch.setattr(Staging, "_copy", counted)
    monkeypatch.setattr("babylon.formats.import_files.CHUNK_BYTES", 50_000)
    talk = [
        {"role": role, "content": "x" * 500} for _ in range(9) for role in ("user", "assistant")
    ]
    lines = [{"messages": [{"role": "system", "content": str(n)}, *talk]} for n in range(20)]
    file = write_lines(tmp_path / "sft.jsonl", *lines)
    added = await import_files(store, [file], window=WINDOW)
    assert (added["trajectories"], added["llm_call_logs"]) == (20, 180)
    assert len(sizes) > 20 and max(sizes) < 250_000


async def test_a_format_that_is_named_is_not_guessed(store: Store, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "sft.jsonl", CHAT)
    with pytest.raises(DatabaseError, match=r"sft\.jsonl:1: .*missing required field"):
        await import_files(store, [file], format=Format.ATIF)


@pytest.mark.parametrize(
    "steps", ["[", "[]", "[1]", '[{"environmentState":null}]', '[{"timestamp":"soon"}]']
)
async def test_a_row_that_is_not_the_games_does_not_stop_the_export(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: str
) -> None:
    rows = [write_atif(a_trace()), write_atif(a_trace("odd"))]
    await import_files(store, [write_lines(tmp_path / "in.jsonl", *rows)])
    await store.pool.execute(
        'UPDATE trajectories SET "stepsJson" = $1 WHERE "trajectoryId" = $2', steps, "odd"
    )
    lines = await export_traces(store, WINDOW, Written.ATIF, tmp_path / "out")
    left_out = "left out: trajectory odd" in caplog.text
    assert (lines, left_out) == ((2, False) if "timestamp" in steps else (1, True))


async def test_exports_are_whole_and_replace_no_file(store: Store, tmp_path: Path) -> None:
    with pytest.raises(WindowError, match="no trajectory was recorded in window"):
        await export_traces(store, WINDOW, Written.ATIF, tmp_path / "out")
    await import_files(store, [write_lines(tmp_path / "in.jsonl", write_atif(a_trace()))])
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DatabaseError, match="out exists already: remove it"):
        await export_traces(store, WINDOW, Written.CHAT, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["in.jsonl", "out"]
    assert (
        await export_traces(store, WINDOW, Written.ATIF, tmp_path / "new" / "folder" / "out") == 1
    )
