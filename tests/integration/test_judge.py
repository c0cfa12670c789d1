"""The score stage with a loopback judge, on a real Postgres and over real HTTP."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from babylon.cli import main
from babylon.core.errors import ConfigError, ScoringError
from babylon.core.metrics import scored_metrics
from babylon.core.trajectories import training_rows
from babylon.core.windows import Clock, WindowState
from babylon.scoring.judge.budget import BudgetSpentError
from babylon.stages.claim import claimed
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.pending import pending_windows
from babylon.stages.score import score_window
from babylon.stages.validate import validate_window
from babylon.store.scores import list_scores
from babylon.store.windows import get_window
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.integration.game import WINDOW, claim, insert_real_window

SECRETS = ("PLANTED-NEWS", "PLANTED-QUESTION", "PLANTED-FUTURE", "PLANTED-PROBABILITY")
CLOCK = Clock(now=datetime(2025, 11, 14, 12, 5, tzinfo=UTC))


@asynccontextmanager
async def judge_for(settings, **mind):
    """A loopback judge, and settings that name it."""
    async with LoopbackJudge(Mind(scale=(-200.0, 200.0), retry_after_s=0.05, **mind)) as judge:
        yield (
            judge,
            settings.replace(
                scoring={"scorer": "ruler"},
                judge={
                    "model": "loopback",
                    "base_url": judge.base_url,
                    "prompt_usd": 1.0,
                    "completion_usd": 4.0,
                },
            ),
        )


async def thinned_window(store, settings, owned=None):
    collected = await collect_window(store, settings.home, owned or await claim(store), WINDOW)
    return thin_window(settings, await validate_window(store, settings, collected))


@pytest.fixture
async def thinned(store, settings):
    await insert_real_window(store)
    return await thinned_window(store, settings)


async def judgments(store, what="*"):
    return await store.pool.fetch(f"SELECT {what} FROM babylon.judgments ORDER BY judgment_id")


async def test_every_judgment_tells_who_judged_by_what_at_which_cost_and_why(
    store, settings, thinned
):
    async with judge_for(settings) as (judge, asked):
        scored = await score_window(store, asked, thinned)
    rows = await judgments(store)
    assert len(rows) == judge.requests > 1
    for row in rows:
        assert (row["judge"], row["method"], row["window_id"]) == ("loopback", "ruler", WINDOW.id)
        assert row["rubric"].startswith("trading-v1@")
        assert len(row["trajectory_ids"]) == len(row["scores"]) == len(row["explanations"])
        assert all(row["explanations"]) and row["prompt_hash"] and row["problem"] is None
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    metrics = scored_metrics(scored)
    assert (metrics["judge_tokens"], metrics["judge_requests"]) == (judge.tokens, judge.requests)
    assert tokens == judge.tokens and metrics["judge_level"] == "full"
    cost = (judge.prompt_tokens + 4 * judge.completion_tokens) / 1e6
    assert metrics["judge_usd"] == pytest.approx(cost)


async def test_the_same_trajectory_shown_twice_is_listed_elsewhere(store, settings, thinned):
    async with judge_for(settings, noise=0.2) as (_, asked):
        await score_window(store, asked, thinned)
    orders = [tuple(row["trajectory_ids"]) for row in await judgments(store)]
    assert len(set(orders)) == len(orders)
    assert orders[0] != tuple(sorted(orders[0]))


@pytest.mark.parametrize("scorer", ["ruler", "preference", "regression"])
async def test_judging_a_window_again_asks_nothing_and_gives_the_same(
    store, settings, thinned, scorer
):
    async with judge_for(settings, noise=0.1) as (judge, asked):
        asked = asked.replace(scoring={"scorer": scorer})
        first = await score_window(store, asked, thinned)
        requests = judge.requests
        second = await score_window(store, asked, thinned)
        assert judge.requests == requests > 0
    assert second == first


async def test_ground_truth_reaches_the_judge_and_no_training_row(store, settings):
    await insert_real_window(store)
    await store.pool.execute(
        'UPDATE market_outcomes SET question = $1, "newsEvents" = $2'
        ' WHERE question IS NOT NULL AND "windowId" = $3',
        SECRETS[1],
        [{"headline": SECRETS[0]}],
        WINDOW.id,
    )
    knowledge = {
        "isTrainingData": True,
        "gameKnowledge": {
            "futureOutcomes": {"m1": SECRETS[2]},
            "trueProbabilities": {SECRETS[3]: 0.9},
        },
    }
    await store.pool.execute('UPDATE trajectories SET "metadataJson" = $1', json.dumps(knowledge))
    thinned = await thinned_window(store, settings)
    async with judge_for(settings) as (judge, asked):
        scored = await score_window(store, asked, thinned)
    for prompt in judge.prompts:
        truth, rest = prompt.split("<ground_truth>")[1].split("</ground_truth>")
        assert "could not know" in truth
        for secret in SECRETS:
            assert secret in truth and secret not in rest
    rows = training_rows(scored.artifact)
    assert len(rows) == scored.artifact.rows > 2
    learnt = repr(rows)
    assert not [secret for secret in SECRETS if secret in learnt]
    assert "ground_truth" not in learnt


async def test_a_failure_half_way_keeps_what_was_bought(store, settings, thinned):
    async with judge_for(settings, faults={"malformed": 0.6}, stubborn=True) as (judge, asked):
        asked = asked.replace(scoring={"scorer": "preference"})
        with pytest.raises(ScoringError, match="no usable judgment"):
            await score_window(store, asked, thinned)
        assert await store.pool.fetchval("SELECT count(*) FROM babylon.scores") == 0
        bought = await judgments(store, "prompt_hash, problem")
        usable = {row["prompt_hash"] for row in bought if row["problem"] is None}
        assert usable
        judge.mind = replace(judge.mind, faults={})
        asked_before = judge.requests
        await score_window(store, asked, thinned)
        assert judge.requests > asked_before
    hashes = [row["prompt_hash"] for row in await judgments(store) if row["problem"] is None]
    assert len(hashes) == len(set(hashes))


KILLED = """
import asyncio, json, sys
from babylon.stages.score import score_window
from babylon.core.settings import load_settings
from babylon.store import open_store
from babylon.core.types import Artifact, Claim, Thinned

async def run():
    fields = json.loads(sys.argv[1])
    thinned = Thinned(claim=Claim(**fields["claim"]), artifact=Artifact(**fields["artifact"]),
                      agents=fields["agents"], dropped=0)
    settings = load_settings()
    async with open_store(settings) as store:
        await score_window(store, settings, thinned)

asyncio.run(run())
"""


async def test_a_kill_half_way_costs_no_judgment_that_was_bought(store, settings, thinned):
    from dataclasses import asdict

    async with judge_for(settings, noise=0.2, delay_s=0.3) as (judge, asked):
        asked = asked.replace(judge={"concurrency": 1})
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, json.dumps(asdict(thinned))],
            env={**os.environ, **asked.environment()},
        )
        while len(await judgments(store)) < 2:
            assert process.poll() is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = {row["prompt_hash"] for row in await judgments(store)}
        asked_before = judge.requests
        judge.mind = replace(judge.mind, delay_s=0.0)
        await score_window(store, asked, thinned)
    rows = await judgments(store)
    assert judge.requests - asked_before == len(rows) - len(kept)
    assert len({row["prompt_hash"] for row in rows}) == len(rows)


async def test_when_money_runs_short_the_cheaper_judge_takes_over(store, settings, thinned):
    async with judge_for(settings) as (_, asked):
        asked = asked.replace(
            judge={
                "prompt_usd": 100.0,
                "day_usd": 0.1,
                "cheaper_model": "cheap",
                "cheaper_prompt_usd": 0.1,
            }
        )
        scored = await score_window(store, asked, thinned)
    assert scored.metrics["level"] == "cheaper"
    assert {row["judge"] for row in await judgments(store)} == {"cheap"}


async def test_without_budget_the_heuristic_scores_and_says_so(store, settings, thinned):
    async with judge_for(settings) as (judge, asked):
        asked = asked.replace(judge={"window_tokens": 10})
        scored = await score_window(store, asked, thinned)
    assert judge.requests == 0
    assert scored.metrics["level"] == "heuristic"
    (first, *_) = await list_scores(store, WINDOW.id)
    assert "scored by the heuristic: the judge's budget of the window" in first.reasons[0]
    assert set(first.components) == {"profit", "win_rate", "activity"}


async def test_a_window_that_is_put_off_waits_and_is_taken_up_again(store, settings):
    await insert_real_window(store)
    async with judge_for(settings) as (judge, asked):
        poor = asked.replace(judge={"day_tokens": 10, "heuristic_fallback": False})
        with pytest.raises(BudgetSpentError, match=r"of the day is spent.*JUDGE_DAY_TOKENS"):
            async with claimed(store, poor.windows, WINDOW) as owned:
                await score_window(store, poor, await thinned_window(store, poor, owned))
        row = await get_window(store, WINDOW.id)
        assert row.state == WindowState.SKIPPED and "budget" in row.reason
        assert [w.id for w in await pending_windows(store, settings, clock=CLOCK)] == [WINDOW.id]
        async with claimed(store, asked.windows, WINDOW) as owned:
            await score_window(store, asked, await thinned_window(store, asked, owned))
        assert judge.requests


async def test_what_a_day_spent_counts_for_its_other_windows(store, settings, thinned):
    async with judge_for(settings) as (judge, asked):
        await score_window(store, asked, thinned)
        await store.pool.execute("UPDATE babylon.judgments SET window_id = 'other', key = 'k'")
        tight = asked.replace(judge={"day_tokens": judge.tokens + 10, "heuristic_fallback": False})
        with pytest.raises(BudgetSpentError, match=f"{judge.tokens} of {judge.tokens + 10}"):
            await score_window(store, tight, thinned)


async def test_judgments_are_written_into_the_game_where_it_is_ours_and_wanted(
    store, settings, thinned
):
    query = (
        'SELECT "aiJudgeReward" AS reward, "aiJudgeReasoning" AS why, t."judgedAt" AS at,'
        ' "overallScore" AS score, rank, "judgeModel" AS model, reasoning'
        ' FROM trajectories t LEFT JOIN reward_judgments USING ("trajectoryId")'
        ' WHERE "aiJudgeReward" IS NOT NULL ORDER BY "aiJudgeReward" DESC'
    )
    async with judge_for(settings) as (_, asked):
        await score_window(store, asked, thinned)
        assert await store.pool.fetch(query) == []
        told = asked.replace(scoring={"write_back": True})
        for _ in range(2):  # again replaces
            scored = await score_window(store, told, thinned)
    rows = await store.pool.fetch(query)
    assert len(rows) == scored.artifact.rows
    assert rows[0]["rank"] == 1 and rows[0]["model"] == "loopback"
    for row in rows:
        assert row["reward"] == row["score"] and row["at"] and row["why"] == row["reasoning"] != ""


async def test_somebody_elses_game_is_never_written(store, settings, thinned):
    foreign = replace(store, game_tables_ours=False)
    async with judge_for(settings) as (judge, asked):
        told = asked.replace(scoring={"write_back": True})
        with pytest.raises(ConfigError, match="JUDGE_WRITE_BACK is on, but"):
            await score_window(foreign, told, thinned)
        assert judge.requests == 0
        scored = await score_window(foreign, asked, thinned)
    assert scored.metrics["level"] == "full"


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            {"judge": {"model": None}},
            "scorer 'ruler' needs a judge: set JUDGE_MODEL",
        ),
        ({"judge": {"base_url": "https://api.openai.com/v1"}}, "set OPENAI_API_KEY"),
        ({"judge": {"prompt_usd": 0, "completion_usd": 0, "day_usd": 1}}, "needs prices"),
        ({"judge": {"rubric": "no-such"}}, "choose trading-v1"),
    ],
)
async def test_what_is_missing_is_said_before_anything_is_bought(
    store, settings, thinned, update, message
):
    async with judge_for(settings) as (judge, asked):
        with pytest.raises(ConfigError, match=message):
            await score_window(store, asked.replace(**update), thinned)
    assert judge.requests == 0


async def test_a_rubric_of_ones_own_is_another_rubric(store, settings, thinned, tmp_path):
    (tmp_path / "mine.txt").write_text("Only courage counts.")
    async with judge_for(settings) as (judge, asked):
        await score_window(store, asked, thinned)
        requests = judge.requests
        mine = asked.replace(judge={"rubric": str(tmp_path / "mine.txt")})
        await score_window(store, mine, thinned)
    assert judge.requests > requests
    assert "Only courage counts." in judge.prompts[-1]
    assert (await judgments(store))[-1]["rubric"].startswith("mine@")


async def test_a_judge_that_takes_too_long_fails_the_stage(store, settings, thinned):
    async with judge_for(settings, delay_s=30) as (_, asked):
        hasty = asked.replace(judge={"timeout_s": 0.2})
        with pytest.raises(ScoringError, match=r"not judged within 0\.2 s .JUDGE_TIMEOUT_SECONDS"):
            await score_window(store, hasty, thinned)


async def test_explain_names_best_and_worst_and_shows_what_the_judge_saw(
    store, settings, thinned, monkeypatch, capsys
):
    async with judge_for(settings) as (_, asked):
        await score_window(store, asked, thinned)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)

    async def explained(*options):
        with pytest.raises(SystemExit) as left:
            await asyncio.to_thread(_cli, ["judge", "explain", "--window", WINDOW.id, *options])
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    code, out, _ = await explained("--json")
    told = json.loads(out)
    (group,) = told["groups"]
    scores = [agent["score"] for agent in group["agents"]]
    assert code == 0 and scores == sorted(scores, reverse=True)
    best = group["agents"][0]
    assert group["best"] == best["agent_id"] and group["worst"] == group["agents"][-1]["agent_id"]
    assert best["low"] <= best["score"] <= best["high"] and best["reasons"]
    assert "<ground_truth>" in best["seen"] and "P&L in this window" in best["seen"]

    _, out, _ = await explained()
    assert f"best {group['best']}, worst {group['worst']}" in out
    _, out, _ = await explained("--agent", group["worst"])
    assert "The judge saw:" in out and group["best"] + " in" not in out
    code, _, err = await explained("--agent", "nobody")
    assert code == 1 and "has no score of agent 'nobody'" in err


def _cli(arguments):
    """Run as ``main`` without signal handlers, which only the main thread may set."""
    from unittest import mock

    with mock.patch("babylon.cli.signal.signal"):
        main(arguments)
