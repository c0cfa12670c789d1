"""Collect, validate, dropout, score and publish on a real Postgres."""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from types import FrameType

import polars as pl
import pyarrow.parquet as pq
import pytest

from babylon.core.artifacts import read_artifact, rewrite_artifact
from babylon.core.errors import ScoringError, ServingError, WindowNotReadyError
from babylon.core.metrics import scored_metrics
from babylon.core.trajectories import Trajectory, read_trajectories, training_rows
from babylon.dataset.schema import SCHEMA_VERSION, SCHEMAS
from babylon.recorder import Action, LlmCall, TrajectoryRecorder
from babylon.scoring.judge.condense import truth_lines
from babylon.scoring.judge.judgment import GroundTruth
from babylon.serving.gateway.exchange import CHAT, Exchange, Identity
from babylon.serving.gateway.route_table import ServingRoute, Target
from babylon.serving.openai_wire import parse_chat
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.score import score_window
from babylon.stages.validate import validate_window
from babylon.store.calls import RecordedCall, insert_calls
from babylon.store.gateways import GatewayRow, announce_gateway
from babylon.tasks.dropout import dropout
from babylon.tasks.publish import publish
from tests.integration.game import (
    WINDOW,
    claim,
    insert,
    insert_real_window,
    insert_trajectories,
    real_rows,
)

SECRET = "SECRET-future-price-404"
_ids = count()


async def validated_window(store, settings):
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    return await validate_window(store, settings, collected)


async def scored_window(store, settings):
    thinned = thin_window(settings, await validated_window(store, settings))
    return await score_window(store, settings, thinned)


def recorded(trajectory_id, step, response, messages, **changes) -> RecordedCall:
    given = {
        "call_id": f"call-{next(_ids)}",
        "agent_id": None,
        "trajectory_id": trajectory_id,
        "step_number": step,
        "policy_version": 2,
        "route_version": 1,
        "model": "babylon",
        "messages": json.dumps(messages),
        "response": response,
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "logprobs": [-0.5],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 8,
        "seed": None,
        "finish_reason": "stop",
        "trainable": True,
        "untrainable_reason": None,
        "started_at": datetime(2025, 11, 14, 9, 2, step, tzinfo=UTC),
        "latency_ms": 1,
    }
    return RecordedCall(**{**given, **changes})


async def test_the_real_window_keeps_five_agents_and_stores_ten_rejections(store, settings):
    await insert_real_window(store)
    validated = await validated_window(store, settings)
    assert (validated.agents, validated.rejected) == (5, {"no_llm_call": 10})
    stored = await store.pool.fetch("SELECT * FROM babylon.rejections")
    assert {row["reason"] for row in stored} == {"no_llm_call"}
    assert len(stored) == 10

    trajectories = read_trajectories(settings.home, validated.artifact)
    best = max(trajectories, key=lambda trajectory: trajectory.pnl_usd)
    assert best.agent_id == "test-agent-3"
    assert best.pnl_usd == pytest.approx(155.83, abs=0.01)
    logs = real_rows("llm_call_logs")
    assert sum(len(trajectory.calls) for trajectory in trajectories) == len(logs)
    assert {(c.messages[1]["content"], c.response) for t in trajectories for c in t.calls} == {
        (log["userPrompt"], log["response"]) for log in logs
    }


async def test_collecting_again_gives_the_same_artifact(store, settings):
    await insert_real_window(store)
    first = await collect_window(store, settings.home, await claim(store), WINDOW)
    again = await collect_window(store, settings.home, await claim(store), WINDOW)
    assert first.artifact == again.artifact
    assert first.artifact.rows == 15
    assert len(list(settings.home.artifacts.iterdir())) == 1


async def test_calls_that_a_silent_gateway_holds_are_waited_for(store, settings, monkeypatch):
    """A stalled database silences exactly the gateway whose calls are not stored yet."""
    await insert_real_window(store)
    monkeypatch.setattr("babylon.stages.collect._WAIT_S", 0.2)
    behind = GatewayRow(
        gateway_id="g1", url="http://one", route_version=1, recorded_until=WINDOW.end
    )
    await announce_gateway(store, behind)
    silence = "UPDATE babylon.gateways SET seen_at = now() - $1 * interval '1 s'"
    await store.pool.execute(silence, 30)
    with pytest.raises(ServingError, match="g1 at http://one"):
        await collect_window(store, settings.home, await claim(store), WINDOW)
    await store.pool.execute(silence, 90)
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    assert collected.artifact.rows == 15


PARQUET = (
    pq.ParquetWriter.write_table,
    pq.ParquetFile.read,
    pq.ParquetFile.iter_batches,
    hashlib.file_digest,
)


@contextmanager
def parquet_of_this_thread() -> Iterator[set[str]]:
    """Yield the names of ``PARQUET`` that this thread calls in the block, not other threads."""
    names = {function.__code__: function.__name__ for function in PARQUET}
    called = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            called.add(names[frame.f_code])

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


async def test_the_event_loop_runs_no_parquet(store, settings):
    await insert_real_window(store)
    with parquet_of_this_thread() as called:
        collected = await collect_window(store, settings.home, await claim(store), WINDOW)
        validated = await validate_window(store, settings, collected)
        crowded = settings.replace(quality={"target_trajectories": 4, "max_dropout": 0.5})
        thinned = await dropout.fn(crowded, validated)
        scored = await score_window(store, settings, thinned)
        await publish.fn(settings, scored)
    assert called == set()
    with parquet_of_this_thread() as called:
        rewritten = rewrite_artifact(settings.home, scored.artifact, lambda frame: frame)
        read_artifact(settings.home, rewritten)
    # it would have been seen, but for writing, which has a thread of its own everywhere
    assert called == {function.__name__ for function in PARQUET} - {"write_table"}


async def test_only_untrained_training_rows_of_the_window_are_collected(store, settings):
    inside, outside = "2025-11-14T09:59:59.999", "2025-11-14T10:00:00"
    await insert_trajectories(
        store,
        {"trajectoryId": "by id"},
        {"trajectoryId": "no id, inside", "windowId": None, "startTime": inside},
        {"trajectoryId": "no id, first moment", "windowId": None, "startTime": "2025-11-14T09:00"},
        {"trajectoryId": "no id, outside", "windowId": None, "startTime": outside},
        {"trajectoryId": "id, but outside", "startTime": outside},
        {"trajectoryId": "next window", "windowId": "2025-11-14T10:00", "startTime": inside},
        {"trajectoryId": "id that looks alike", "windowId": "2025-11-14T09:0_"},
        {"trajectoryId": "evaluation", "isEvaluation": True},
        {"trajectoryId": "not for training", "isTrainingData": False},
        {"trajectoryId": "used by the game", "usedInTraining": True},
        {"trajectoryId": "used by us"},
    )
    await store.pool.execute("INSERT INTO babylon.trained VALUES ('used by us', 'w', 'b')")
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    ids = read_artifact(settings.home, collected.artifact, ["trajectory_id"])[
        "trajectory_id"
    ].to_list()
    by_time = ["by id", "id that looks alike", "next window"]
    assert ids == [*by_time, "no id, first moment", "no id, inside"]
    with pytest.raises(WindowNotReadyError, match="2 other_window"):
        await validate_window(store, settings, collected)
    rejected = await store.pool.fetch("SELECT * FROM babylon.rejections ORDER BY trajectory_id")
    assert [row["trajectory_id"] for row in rejected] == by_time[1:]
    assert {row["reason"] for row in rejected} == {"other_window"}
    assert "id '2025-11-14T09:0_' is not YYYY-MM-DDTHH:MM" in rejected[0]["detail"]
    assert "id 2025-11-14T10:00 (60 minutes) lies outside window" in rejected[1]["detail"]


async def test_more_rows_than_one_fetch_are_streamed(store, settings):
    await insert_trajectories(store, *({"trajectoryId": f"t{n:03}"} for n in range(450)))
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    ids = read_artifact(settings.home, collected.artifact, ["trajectory_id"])[
        "trajectory_id"
    ].to_list()
    assert ids == [f"t{n:03}" for n in range(450)]


async def test_only_trainable_finite_gateway_tokens_join_their_calls(store, settings):
    await insert_real_window(store)
    logs = real_rows("llm_call_logs")
    one = [row for row in logs if row["trajectoryId"] == logs[0]["trajectoryId"]][:6]
    (agent,) = await store.pool.fetchrow(
        'SELECT "agentId" FROM trajectories WHERE "trajectoryId" = $1', one[0]["trajectoryId"]
    )
    changes = [
        {"agent_id": agent},
        {"trainable": False, "untrainable_reason": "top_p"},
        {"logprobs": [float("-inf")]},
        {"response": "another answer"},
        {"trajectory_id": one[0]["trajectoryId"][:-1]},
        {"agent_id": "somebody-else"},
    ]
    await insert_calls(
        store,
        [
            recorded(
                **{
                    "trajectory_id": log["trajectoryId"],
                    "step": int(log["stepId"].rsplit("-", 1)[1]),
                    "response": log["response"],
                    "messages": json.loads(log["messagesJson"]),
                    **change,
                }
            )
            for log, change in zip(one, changes, strict=True)
        ],
    )
    validated = await validated_window(store, settings)
    trajectories = {
        t.trajectory_id: t for t in read_trajectories(settings.home, validated.artifact)
    }
    calls = trajectories[one[0]["trajectoryId"]].calls
    assert [call.retokenized for call in calls[:6]] == [False, True, True, True, True, True]
    assert (calls[0].completion_token_ids, calls[0].logprobs) == ((3,), (-0.5,))
    assert (calls[0].policy_version, calls[1].policy_version) == (2, None)
    reasons = [None, "top_p", "a logprob is not finite", None, None, None]
    assert [call.untrainable for call in calls[:6]] == reasons
    others = [t for t in trajectories.values() if t.trajectory_id != one[0]["trajectoryId"]]
    assert all(call.retokenized for trajectory in others for call in trajectory.calls)


async def test_a_sampled_nul_is_recorded_by_both_and_joined(store, settings):
    messages = [{"role": "user", "content": "you said a\0, not \\u0000"}]
    fields = {"model": "babylon", "messages": messages}
    target = Target("babylon-v2", 2, "/checkpoints/2")
    recorder = TrajectoryRecorder(store)
    for agent in ("a", "b"):
        trajectory = recorder.start(agent, at=WINDOW.start)
        exchange = Exchange(
            call_id=agent,
            identity=Identity(agent_id=agent, trajectory_id=trajectory, step=0),
            request=parse_chat(fields),
            fields=fields,
            dialect=CHAT,
            assigned=ServingRoute(1, "babylon", target).assign("babylon", agent),
            key_id="k",
            text="HOLD\0",
            prompt_token_ids=array("i", [1]),
            token_ids=array("i", [7, 0]),
            logprobs=array("d", [-0.5, -9.0]),
            completion_tokens=2,
        )
        await insert_calls(store, [exchange.record()])
        recorder.step(
            trajectory,
            environment_state={"agentBalance": 1000, "agentPnL": 0, "openPositions": 0},
            llm_calls=[
                LlmCall(
                    model="babylon",
                    system_prompt="",
                    user_prompt=messages[0]["content"],
                    response="HOLD\0",
                    reasoning="\0",
                    temperature=1.0,
                    max_tokens=2,
                    purpose="action",
                )
            ],
            action=Action(action_type="HOLD", success=True, parameters={}),
            reward=0.0,
            at=WINDOW.start,
        )
        await recorder.finish(trajectory, at=WINDOW.start)
    two_agents = settings.replace(windows={"min_agents": 2}, quality={"min_actions": 1})
    validated = await validated_window(store, two_agents)
    for trajectory in read_trajectories(settings.home, validated.artifact):
        (call,) = trajectory.calls
        assert (call.response, call.completion_token_ids) == ("HOLD\ufffd", (7, 0))
        assert call.messages[0]["content"] == "you said a\ufffd, not \\u0000"


async def test_ground_truth_reaches_neither_training_rows_nor_the_dataset(store, settings):
    users, logs, outcomes = (
        real_rows(name) for name in ("users", "llm_call_logs", "market_outcomes")
    )
    trajectories = real_rows("trajectories")
    for row in trajectories:
        steps = json.loads(row["stepsJson"])
        for step in steps:
            step["action"]["correctness"] = {"actualOutcome": SECRET, "predictionCorrect": True}
            step["environmentState"]["future"] = SECRET
            for call in step["llmCalls"]:
                call["groundTruth"] = SECRET
        row["stepsJson"] = json.dumps(steps)
        row["metadataJson"] = json.dumps(
            {"gameKnowledge": {"futureOutcomes": {"m1": SECRET}, "trueProbabilities": {SECRET: 1}}}
        )
        row["metricsJson"] = json.dumps({"futureOutcome": SECRET})
    for row in outcomes:
        row["question"] = row["outcome"] = SECRET
        row["newsEvents"] = [SECRET]
    for row in logs:
        row["metadata"] = row["reasoning"] = SECRET
    for name, rows in {
        "users": users,
        "trajectories": trajectories,
        "llm_call_logs": logs,
        "market_outcomes": outcomes,
    }.items():
        await insert(store, name, rows)

    scored = await scored_window(store, settings)
    frame = read_artifact(settings.home, scored.artifact)
    assert frame["knowledge_json"].str.contains(SECRET).all()  # it is there, for the judge
    for column in set(frame.columns) - {"knowledge_json", "game_json"}:
        assert SECRET not in str(frame[column].to_list()), column
    rows = training_rows(settings.home, scored.artifact)
    assert len(rows) == 5
    assert SECRET not in str(rows)

    async with store.pool.acquire() as connection:
        await connection.execute("UPDATE babylon.windows SET state = 'deployed'")
        await connection.execute("UPDATE babylon.scores SET reasons = ARRAY[$1]", SECRET)
    for published in await publish.fn(settings, scored):
        public = pl.read_parquet(settings.home.resolve(published.uri))
        schema = next(SCHEMAS[name] for name in SCHEMAS if f"/{name}/" in published.uri)
        told = [one.name for one in schema if one.metadata[b"about"].startswith(b"Ground truth")]
        if "/outcomes/" not in published.uri:
            assert SECRET not in str(public.drop(told).to_dicts())


async def test_a_change_from_a_price_of_zero_is_unknown_to_the_judge(store, settings):
    """The game divides by it; Postgres' numeric keeps the NaN, which JSON has no word for."""
    await insert_real_window(store)
    outcome = real_rows("market_outcomes")[0]
    await store.pool.execute(
        'UPDATE market_outcomes SET "startPrice" = 0, "endPrice" = \'NaN\','
        " \"changePercent\" = 'NaN', \"finalProbability\" = 'NaN' WHERE id = $1",
        outcome["id"],
    )
    validated = await validated_window(store, settings)
    (knowledge, *_) = read_artifact(settings.home, validated.artifact)["knowledge_json"]
    told = json.loads(knowledge)["market_outcomes"]
    (row,) = [row for row in told if row["startPrice"] == 0]
    assert row["endPrice"] is row["changePercent"] is row["finalProbability"] is None
    assert len(truth_lines(GroundTruth(outcomes=tuple(told)))) == len(told)


async def test_too_few_agents_is_refused_with_the_count_and_the_reasons(store, settings):
    await insert_real_window(store)
    demanding = settings.replace(windows={"min_agents": 6})
    with pytest.raises(
        WindowNotReadyError,
        match=r"window 2025-11-14T09:00 has 5 eligible agents, minimum is 6 .*10 no_llm_call",
    ):
        await validated_window(store, demanding)


async def test_scores_are_stored_with_components_and_added_to_the_rows(store, settings):
    await insert_real_window(store)
    scored = await scored_window(store, settings)
    stored = await store.pool.fetch("SELECT * FROM babylon.scores")
    rows = {row.trajectory_id: row.score for row in training_rows(settings.home, scored.artifact)}
    assert {row["trajectory_id"]: row["score"] for row in stored} == rows
    assert all(set(row["components"]) == {"pnl_usd", "drawdown_usd"} for row in stored)
    assert scored.scorer == "heuristic"
    assert scored.avg_reward == pytest.approx(sum(rows.values()) / 5)


def boom(trajectories: Sequence[Trajectory]) -> list[float]:
    raise RuntimeError("no judgment")


def by_pnl(trajectories: Sequence[Trajectory]) -> list[float]:
    return [trajectory.pnl_usd for trajectory in trajectories]


async def test_an_own_scorer_scores_and_a_failing_one_stores_nothing(store, settings):
    await insert_real_window(store)
    mine = settings.replace(scoring={"scorer": f"{__name__}:by_pnl"})
    scored = await scored_window(store, mine)
    best = max(training_rows(settings.home, scored.artifact), key=lambda row: row.score)
    assert (best.agent_id, scored.scorer) == ("test-agent-3", f"{__name__}:by_pnl")

    await store.pool.execute("DELETE FROM babylon.scores")
    failing = settings.replace(scoring={"scorer": f"{__name__}:boom"})
    with pytest.raises(ScoringError, match="boom raised RuntimeError"):
        await scored_window(store, failing)
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.scores") == 0


async def test_publishing_twice_leaves_one_file_a_table_with_allowed_columns_only(store, settings):
    await insert_real_window(store)
    scored = await scored_window(store, settings)
    published = await publish.fn(settings, scored)
    assert await publish.fn(settings, scored) == published
    files = {path.parts[-3]: path for path in settings.home.datasets.rglob("*.parquet")}
    assert files.keys() == SCHEMAS.keys()
    for table, path in files.items():
        assert path.match(f"{table}/2025-11/2025-11-14T09-00-train-????????.parquet")
        assert pl.read_parquet_schema(path).keys() == {*SCHEMAS[table].names}
    told = pl.read_parquet(files["trajectories"])
    assert (
        told["scorer"].unique().to_list() == ["heuristic"] and told["judge_model"].null_count() == 5
    )
    assert told["schema_version"].unique().to_list() == [SCHEMA_VERSION]


async def test_what_dropout_saves_the_judge_is_a_metric_of_the_window(store, settings):
    await insert_real_window(store)
    crowded = settings.replace(
        quality={"target_trajectories": 4, "max_dropout": 0.5}, scoring={"scorer": "ruler"}
    )
    thinned = thin_window(crowded, await validated_window(store, settings))
    assert (thinned.dropped, thinned.saved_judge_tokens > 500) == (1, True)
    scored = await score_window(store, settings, thinned)  # whoever scores what is left
    assert scored_metrics(scored)["judge_saved_tokens"] == thinned.saved_judge_tokens
