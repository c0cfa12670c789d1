"""DPO through the train stage: sampled after a window, valued in the simulator, trained once."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.errors import WindowNotReadyError
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, TrainingRow, training_rows
from babylon.core.types import Scored
from babylon.core.windows import parse_window_id
from babylon.evaluation.arena.engine_players import engine_table
from babylon.evaluation.preferences.choose import informative
from babylon.evaluation.preferences.draws import draws_of
from babylon.evaluation.preferences.engine_sample import engine_replies
from babylon.evaluation.preferences.sample import sample_replies
from babylon.evaluation.rebuild.recorded import RecordedRow
from babylon.evaluation.rebuild.recorded_windows import played_rows
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import STARTER
from babylon.policies.checkpoint_files import context_of
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.scoring.scorer import FALLBACK
from babylon.stages.sample_replies import replies_for
from babylon.stages.train import train_window
from babylon.stages.words import words_for
from babylon.store import Store
from babylon.store.policies import ensure_base, get_policy
from babylon.store.population import MemberRow, add_generation, list_members, list_siblings
from babylon.store.replies import read_replies
from babylon.store.scores import StoredScore, replace_scores
from babylon.store.windows import claim_window
from tests.deciding_policy import save_deciding_policy
from tests.deployments import until_announced
from tests.integration.test_serving import running_stack, until_healthy
from tests.tiny_policy import tiny_model, tiny_tokenizer

WINDOW = "2025-11-14T09:00"
UNREAD = {  # by the trainer: facts, the outcome of a step, and ground truth
    "window_id": WINDOW,
    "start": datetime(2025, 11, 14, 9, tzinfo=UTC),
    "end": datetime(2025, 11, 14, 10, tzinfo=UTC),
    **dict.fromkeys(("pnl_usd", "drawdown_usd"), 12.5),
    **dict.fromkeys(("wins", "trades", "actions", "steps"), 0),
    "payoffs_json": '[{"step":0,"pnl_usd":12.5}]',
    "knowledge_json": '{"m1":"RESOLVES-YES"}',
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deciding_policy(tmp_path_factory.mktemp("deciding"))


async def recorded_fleet(store: Store, settings: Settings) -> list[RecordedRow]:
    """Rows of eight scripted agents, as the recorder writes them."""
    start = datetime(2025, 11, 14, 9, tzinfo=UTC)
    plan = FleetPlan(start=start, duration_min=6, agents=8, rules=STARTER, shared=False)
    await run_fleet(store, settings, plan, "scripted")
    rows = await played_rows(store, parse_window_id(WINDOW), apart_from=(), most=99)
    return [row for row in rows if isinstance(row, RecordedRow)]


def as_called(base: Path, rows: list[RecordedRow]) -> list[TrainingRow]:
    """The rows with exact tokens, as if the policy had said what the scripted agents did."""
    _, tokenizer = load_policy(base)
    made = []
    for row in rows:
        calls = []
        for number, step in enumerate(row.steps):
            (asked,) = step.llm_calls
            completion = tokenizer.encode(step.reply or "", add_special_tokens=False)
            calls.append(
                Call(
                    step=number,
                    messages=asked.prompt,
                    response=step.reply or "",
                    policy_version=0,
                    prompt_token_ids=tuple(render_prompt(tokenizer, list(asked.prompt))),
                    completion_token_ids=(*completion, tokenizer.eos_token_id),
                )
            )
        made.append(
            TrainingRow(
                trajectory_id=row.trajectory_id,
                agent_id=row.agent_id,
                scenario_id=row.scenario_id,
                score=0.5,  # a tie: the window teaches GRPO nothing
                calls=tuple(calls),
            )
        )
    return made


async def tied_window(store: Store, settings: Settings, base: Path) -> Scored:
    played = as_called(base, await recorded_fleet(store, settings))
    claim = await claim_window(store, parse_window_id(WINDOW), owner="test", lease_s=60)
    frame = pl.DataFrame(
        [
            {
                "trajectory_id": row.trajectory_id,
                "agent_id": row.agent_id,
                "scenario_id": row.scenario_id,
                "score": row.score,
                "calls_json": msgspec.json.encode(row.calls).decode(),
                **UNREAD,
            }
            for row in played
        ]
    )
    return Scored(
        claim=claim,
        artifact=write_artifact(settings.home, frame, window_id=WINDOW, stage="scored"),
        eligible=len(played),
        agents=len(played),
        scorer="heuristic",
        avg_reward=0.5,
    )


async def test_members_with_a_temperature_sample_their_own_replies(
    store: Store, settings: Settings, base: Path
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "dpo", "iterations": 1, "learning_rate": 1e-3, "lora_rank": 2},
        preferences={"prompts": 5, "replies": 6},
        population={"size": 2, "genes": "temperature", "worlds": 16},
    )
    evolved = [
        MemberRow(generation=0, member=n, parent=None, origin="founder", genes={"temperature": t})
        for n, t in enumerate((0.7, 1.3))
    ]
    await add_generation(store, evolved)
    await train_window(store, settings, await tied_window(store, settings, base))
    # none at PREFERENCE_TEMPERATURE, from which no member would learn
    genes = {member.genes["temperature"] for member in await list_members(store)}
    sampled = await store.pool.fetch("SELECT DISTINCT temperature FROM babylon.sampled_replies")
    assert {row["temperature"] for row in sampled} == genes and len(genes) == 2
    siblings = await list_siblings(store)
    assert len({one.metrics["update_norm"] for one in siblings}) == 2


async def test_a_window_that_is_tried_again_for_more_samples_it(
    store: Store, settings: Settings, base: Path
) -> None:
    """The remedy of a window without pairs is to ask for more."""
    await ensure_base(store, uri=str(base), base_model="deciding")
    scored = await tied_window(store, settings, base)
    settings = settings.replace(training={"objective": "dpo"})
    rows = await asyncio.to_thread(training_rows, settings.home, scored.artifact)
    counts = []
    for prompts, replies in ((3, 3), (3, 6), (2, 2), (5, 2), (5, 6)):
        asked = settings.replace(preferences={"prompts": prompts, "replies": replies})
        work: Any = SimpleNamespace(
            store=store, settings=asked, parent=await get_policy(store, 0), rows=rows
        )
        found = await replies_for(work, scored, asked.judge)
        counts.append([len(one.replies) for one in found])
    assert counts == [[3] * 3, [6] * 3, [6] * 2, [2] * 5, [6] * 5]  # the third: stored ones suffice
    kept = await read_replies(store, WINDOW, 0, asked.preferences.temperature, "simulator")
    assert {len(one.replies) for one in kept} == {6}
    assert await read_replies(store, WINDOW, 0, asked.preferences.temperature, "judge") == []


async def test_a_window_of_ties_teaches_by_preferences(
    store: Store, settings: Settings, base: Path
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "dpo", "iterations": 2, "learning_rate": 1e-3, "warmup_steps": 0},
        preferences={"prompts": 5, "replies": 6},
    )
    scored = await tied_window(store, settings, base)
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        await train_window(store, settings.replace(training={"objective": "grpo"}), scored)

    trained = await train_window(store, settings, scored)
    assert trained.metrics["pairs"] > 0 and trained.metrics["margin_after"] > 0

    stored = await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2")
    assert len(stored) == 5 and {row["policy_version"] for row in stored} == {0}
    used = await store.pool.fetch("SELECT trajectory_id FROM babylon.trained")
    assert {row["trajectory_id"] for row in used} <= {row["trajectory_id"] for row in stored}
    # what was trained is not offered again
    left = {one.trajectory_id for one in await read_replies(store, WINDOW, 0, 1.0, "simulator")}
    assert not left & {row["trajectory_id"] for row in used}
    assert (await get_policy(store, 1)).metrics["pairs"] == trained.metrics["pairs"]

    # the tokens are those of recorded prompts and of the policy: no outcome is among them
    _, tokenizer = load_policy(base)
    texts = [tokenizer.decode(row["prompt_token_ids"]) for row in stored]
    rows = await played_rows(store, parse_window_id(WINDOW), apart_from=(), most=99)
    truth = {str(key) for row in rows if isinstance(row, RecordedRow) for key in row.knowledge}
    assert truth and not any(word in text for word in truth for text in texts)
    asked = {
        "".join(str(m["content"]) for m in step.llm_calls[0].prompt)
        for row in rows
        if isinstance(row, RecordedRow)
        for step in row.steps
    }
    assert all(any(prompt.splitlines()[-1] in text for prompt in asked) for text in texts)


async def test_the_engine_that_serves_draws_the_replies_and_no_model_is_loaded_for_them(
    store: Store,
    settings: Settings,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "dpo", "iterations": 1, "learning_rate": 1e-3, "warmup_steps": 0},
        preferences={"prompts": 5, "replies": 6},
    )
    scored = await tied_window(store, settings, base)
    points = informative(training_rows(settings.home, scored.artifact), 3)
    foreign = msgspec.structs.replace(points[2].call, prompt_token_ids=(1, 10**6))
    points[2] = replace(points[2], call=foreign)
    here = await asyncio.to_thread(sample_replies, str(base), points, 6, 1.0, 0)
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        await until_announced(store)
        async with engine_table(store, "babylon", [0]) as table:
            assert table is not None
            draws = draws_of(points, 6, 1.0, 0, context_of(str(base)))
            served = await engine_replies(table, 0, points, draws)
        assert [len(replies) for replies in served] == [len(replies) for replies in here]
        drawn, own = served[0] + served[1], here[0] + here[1]
        # rounding in another batch may move a token
        assert sum(a == b for a, b in zip(drawn, own, strict=True)) >= len(own) - 1 > 0
        assert served[2] == here[2] == [] and "refused 1 of 3 prompts" in caplog.text

        monkeypatch.setattr("babylon.evaluation.preferences.sample.load", _stopped)
        trained = await train_window(store, settings, scored)
        assert trained is not None and trained.metrics["pairs"]
        assert await stack.rows() == []  # what is sampled for an update is nobody's play


async def test_a_run_that_resumes_trains_on_the_same_replies(
    store: Store, settings: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "grpo+dpo", "iterations": 1},
        preferences={"prompts": 3, "replies": 6},
    )
    scored = await tied_window(store, settings, base)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("babylon.stages.siblings.updater", _stopped)
        await train_window(store, settings, scored)
    before = await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2")
    trained = await train_window(store, settings, scored)
    assert await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2") == before
    assert trained.metrics["pairs"] > 0  # the scores tie, so the pairs teach alone


async def test_a_window_of_ties_teaches_by_words_that_no_row_holds(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    reading = tiny_model(0, max_position_embeddings=8192)  # the deciding policy reads nothing
    reading.save_pretrained(tmp_path / "reading")
    tiny_tokenizer().save_pretrained(tmp_path / "reading")
    await ensure_base(store, uri=str(tmp_path / "reading"), base_model="reading")
    settings = settings.replace(
        training={"objective": "sdpo", "iterations": 1, "learning_rate": 1e-3, "warmup_steps": 0}
    )
    scored = await tied_window(store, settings, tmp_path / "reading")
    rows = training_rows(settings.home, scored.artifact)
    said = ("TOO-TIMID", f"{FALLBACK}the budget is spent")
    reasons = [
        StoredScore(trajectory_id=row.trajectory_id, scorer="ruler", score=0.5, reasons=said)
        for row in rows
    ]
    await replace_scores(store, scored.claim, reasons)
    trained = await train_window(store, settings, scored)
    assert trained is not None
    assert trained.metrics["calls_with_words"] == trained.metrics["calls"] > 0
    assert float(trained.metrics["teacher_before"] or 0) > 0 and trained.metrics["kl_after"]

    words = await words_for(store, settings.home, scored, rows, "grpo+sdpo")
    assert len(words) == sum(len(row.calls) for row in rows)
    assert all("TOO-TIMID" in one.text and "budget" not in one.text for one in words)
    assert all(("$+12.50" in one.text) == (one.call == 0) for one in words)
    assert await words_for(store, settings.home, scored, rows, "grpo+dpo") == []
    learnt = msgspec.json.encode(rows).decode()
    assert not any(secret in learnt for secret in ("TOO-TIMID", "12.5", "RESOLVES-YES"))


def _stopped(name: str, *_: object) -> object:
    raise InterruptedError(name)
