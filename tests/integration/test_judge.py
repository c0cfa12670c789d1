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
from babylon.core.errors import ConfigError, ScoringError, WindowNotReadyError
from babylon.core.metrics import scored_metrics
from babylon.core.trajectories import training_rows
from babylon.core.windows import Clock, WindowState
from babylon.dataset.scores import read_scores
from babylon.scoring.judge.budget import Budget, BudgetLimits, BudgetSpentError
from babylon.scoring.judge.reported_validity import read_validity
from babylon.scoring.judge.validity import UnprovenJudgeError
from babylon.stages.claim import claimed
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.pending import pending_windows
from babylon.stages.score import score_window
from babylon.stages.train_judge import JudgeTraining
from babylon.stages.train_judge_windows import outcome_windows, train_own_judge
from babylon.stages.validate import validate_window
from babylon.store.judge_validity import (
    WindowValidity,
    judged_before,
    known_judges,
    store_validity,
)
from babylon.store.judgments import Purchase, StoredJudgments
from babylon.store.published import withhold
from babylon.store.rejections import window_rejections
from babylon.store.scores import list_scores
from babylon.store.windows import get_window, set_state
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


async def answered(store):
    """The prompts of the replies that were stored."""
    return [r["prompt_hash"] for r in await judgments(store) if not r["key"].endswith("/sent")]


async def test_every_judgment_stores_judge_rubric_cost_and_reason(store, settings, thinned):
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


async def test_a_trajectory_shown_twice_is_listed_elsewhere(store, settings, thinned):
    async with judge_for(settings, noise=0.2) as (_, asked):
        await score_window(store, asked, thinned)
    orders = [tuple(row["trajectory_ids"]) for row in await judgments(store)]
    assert len(set(orders)) == len(orders)
    assert orders[0] != tuple(sorted(orders[0]))


async def test_judging_again_asks_nothing_and_is_equal(store, settings, thinned):
    async with judge_for(settings, noise=0.1) as (judge, asked):
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
    rows = training_rows(settings.home, scored.artifact)
    assert len(rows) == scored.artifact.rows > 2
    learnt = repr(rows)
    assert not [secret for secret in SECRETS if secret in learnt]
    assert "ground_truth" not in learnt


HOSTILE = {
    "surrogate": '{"reasoning": "to the moon \\ud83d"}',
    "deep": '{"reasoning":' + "[" * 1200 + "]" * 1200 + "}",
    "forbidden": "PLANTED-PROMPT forbidden words",
}


async def test_one_hostile_reply_costs_at_most_its_trajectory_and_leaks_nothing(
    store, settings, monkeypatch, capsys
):
    await insert_real_window(store)
    ids = await store.pool.fetch('SELECT "trajectoryId" FROM trajectories ORDER BY 1')
    for (name,), said in zip(ids, HOSTILE.values(), strict=False):
        steps = json.loads(
            await store.pool.fetchval(
                'SELECT "stepsJson" FROM trajectories WHERE "trajectoryId" = $1', name
            )
        )
        # The budget leaves out the words of quiet steps, and words that were said before.
        for number, step in enumerate(steps):
            step["llmCalls"][0]["response"] = said.replace("words", f"words {number}")
        await store.pool.execute(
            'UPDATE trajectories SET "stepsJson" = $2 WHERE "trajectoryId" = $1',
            name,
            json.dumps(steps),
        )
    knowledge = {"gameKnowledge": {"futureOutcomes": {"m1": SECRETS[2]}}}
    await store.pool.execute('UPDATE trajectories SET "metadataJson" = $1', json.dumps(knowledge))
    thinned = await thinned_window(store, settings)
    async with judge_for(settings, refuses="forbidden words", key="PLANTED-KEY") as (judge, asked):
        asked = asked.replace(judge={"api_key": "PLANTED-KEY"})
        scored = await score_window(store, asked, thinned)
        assert judge.faults["error_400"]
    rejected = await window_rejections(store, WINDOW.id)
    (refused,) = [one for one in rejected if one.reason in ("judge_refused", "no_judgment")]
    assert (refused.reason, refused.count) == ("judge_refused", 1)
    assert refused.samples[0].trajectory_id == ids[2][0]
    assert scored.artifact.rows == thinned.artifact.rows - 1
    assert {row.trajectory_id for row in training_rows(settings.home, scored.artifact)} == {
        row.trajectory_id for row in await list_scores(store, WINDOW.id)
    }
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    for page in (["judge", "cost"], ["judge", "explain", "--window", WINDOW.id]):
        with pytest.raises(SystemExit):
            await asyncio.to_thread(_cli, page)
    for page in (["windows", "list"], ["windows", "show", WINDOW.id]):
        with pytest.raises(SystemExit):
            await asyncio.to_thread(_cli, page)
    told = capsys.readouterr()
    told = told.out + told.err + repr(await judgments(store, "problem")) + repr(refused)
    assert "judge_refused" in told and "Cost of the judge" in told
    assert "PLANTED" not in told


async def test_a_window_that_fails_keeps_a_reason_without_the_truth(store, settings):
    """An error of a library that quotes what it failed on."""

    async def careless(trajectories, context):
        SECRETS[0].encode().decode("utf-7")
        f"{SECRETS[0]}\ud83d".encode()

    await insert_real_window(store)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("babylon.stages.score.load_scorer", lambda name: careless)
    with monkey.context(), pytest.raises(ScoringError, match="raised UnicodeEncodeError at test_j"):
        async with claimed(store, settings.windows, WINDOW) as owned:
            await score_window(store, settings, await thinned_window(store, settings, owned))
    monkey.undo()
    row = await get_window(store, WINDOW.id)
    assert row.state == WindowState.FAILED
    assert "UnicodeEncodeError" in row.reason and "PLANTED" not in row.reason


async def test_too_few_judged_agents_skip_the_window_with_the_reasons(store, settings, thinned):
    async with judge_for(settings, refuses="a") as (_, asked):
        asked = asked.replace(windows={"min_agents": thinned.agents + 1})
        with pytest.raises(ScoringError, match=r"no usable judgment of .*judge_refused"):
            await score_window(store, asked, thinned)


@pytest.mark.parametrize("refusal", ["error_400", "refusal"])
async def test_what_a_judge_declined_is_asked_again_after_a_failed_stage(
    store, settings, thinned, refusal
):
    async with judge_for(settings, refuses="a", refusal=refusal) as (judge, asked):
        with pytest.raises(ScoringError, match="judge_refused"):
            await score_window(store, asked, thinned)
        cost = sum(row["prompt_tokens"] for row in await judgments(store))
        judge.mind = replace(judge.mind, refuses="")
        await score_window(store, asked, thinned)
    declined = [row for row in await judgments(store) if row["problem"]]
    assert {row["key"].partition("/")[2] for row in declined} == {"forgotten"}
    assert sum(row["prompt_tokens"] for row in declined) == cost


async def test_entries_at_the_same_time_never_exceed_the_budget_together(store):
    """Two windows, as two processes judge them."""
    budget = Budget(day=BudgetLimits(tokens=1000))
    draft = Purchase(
        **dict.fromkeys(["key", "scenario_id", "judge", "method", "rubric", "prompt_hash"], "x"),
        trajectory_ids=(),
        prompt_tokens=60,
        completion_tokens=40,
    )
    ledgers = [StoredJudgments(store, f"w{i % 2}") for i in range(30)]
    entered = await asyncio.gather(
        *[ledger.enter(draft, budget) for ledger in ledgers], return_exceptions=True
    )
    assert sum(isinstance(one, int) for one in entered) == 10
    assert sum(isinstance(one, BudgetSpentError) for one in entered) == 20
    accounts = await ledgers[0].spent()
    assert accounts.day.tokens == 1000 and 0 < accounts.window.tokens < 1000


async def test_a_failure_half_way_keeps_what_was_bought(store, settings, thinned):
    async with judge_for(settings, noise=0.2, delay_s=0.2) as (judge, asked):
        scoring = asyncio.create_task(score_window(store, asked, thinned))
        while not judge.requests and not scoring.done():
            await asyncio.sleep(0.001)
        judge.mind = replace(judge.mind, key="another")  # from the second request on
        with pytest.raises(ScoringError, match="Incorrect API key"):
            await scoring
        assert await store.pool.fetchval("SELECT count(*) FROM babylon.scores") == 0
        bought = await judgments(store, "prompt_hash, problem")
        usable = {row["prompt_hash"] for row in bought if row["problem"] is None}
        assert usable
        judge.mind = replace(judge.mind, key="", delay_s=0.0)
        asked_before = judge.requests
        await score_window(store, asked, thinned)
        assert judge.requests > asked_before
    hashes = [row["prompt_hash"] for row in await judgments(store) if row["problem"] is None]
    assert len(hashes) == len(set(hashes))


KILLED = """
import asyncio, json, sys
from babylon.stages.score import score_window
from babylon.core.settings_loading import load_settings
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
        while len(await answered(store)) < 2:
            assert process.poll() is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = await answered(store)
        asked_before = judge.requests
        judge.mind = replace(judge.mind, delay_s=0.0)
        await score_window(store, asked, thinned)
    rows = await answered(store)
    assert judge.requests - asked_before == len(rows) - len(kept)
    assert len(set(rows)) == len(rows)
    unanswered = [row for row in await judgments(store) if row["key"].endswith("/sent")]
    assert len(unanswered) <= 1 and all(row["prompt_tokens"] > 0 for row in unanswered)


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
        await score_window(store, asked, thinned)
        bought = judge.requests
        await store.pool.execute("DELETE FROM babylon.judgments WHERE judgment_id % 4 = 0")
        asked = asked.replace(judge={"window_tokens": 10})
        scored = await score_window(store, asked, thinned)
    assert judge.requests == bought and await judgments(store)
    columns = await read_scores(store, WINDOW.id)
    assert {row["judge_model"] for row in columns.values()} == {None}  # it judged in part
    assert scored.metrics["level"] == "heuristic"
    (first, *_) = await list_scores(store, WINDOW.id)
    assert "scored by the heuristic: the judge's budget of the window" in first.reasons[0]
    assert set(first.components) == {"pnl_usd", "drawdown_usd"}


async def test_a_window_that_is_put_off_waits_and_is_taken_up_again(store, settings):
    await insert_real_window(store)
    async with judge_for(settings) as (judge, asked):
        poor = asked.replace(judge={"day_tokens": 10, "heuristic_fallback": False})
        with pytest.raises(BudgetSpentError, match=r"of the day is spent.*JUDGE_DAY_TOKENS"):
            async with claimed(store, poor.windows, WINDOW) as owned:
                await score_window(store, poor, await thinned_window(store, poor, owned))
        row = await get_window(store, WINDOW.id)
        assert row.state == WindowState.SKIPPED and "budget" in row.reason
        look = (store, settings.windows, settings.quality)
        assert await pending_windows(*look, clock=CLOCK) == []  # not at every look
        await store.pool.execute("UPDATE babylon.windows SET retry_at = NULL")
        assert [window.id for window in await pending_windows(*look, clock=CLOCK)] == [WINDOW.id]
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


async def test_judgments_are_written_into_our_game_if_wanted(store, settings, thinned):
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
        ({"judge": {"model": None}}, "scorer 'ruler' needs a judge: set JUDGE_MODEL"),
        ({"judge": {"base_url": "https://api.openai.com/v1"}}, "set OPENAI_API_KEY"),
        ({"judge": {"prompt_usd": 0, "completion_usd": 0, "day_usd": 1}}, "needs prices"),
        ({"judge": {"rubric": "no-such"}}, "choose trading-v1"),
    ],
)
async def test_missing_keys_fail_before_buying(store, settings, thinned, update, message):
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


async def test_explain_names_best_and_worst(store, settings, thinned, monkeypatch, capsys):
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


async def test_a_judge_trains_when_other_windows_have_proved_it(store, settings, thinned):
    """Five plays prove too little. The window waits, and is scored when the judge is proved."""
    async with judge_for(settings) as (judge, asked):
        asked = asked.replace(judge={**asked.judge.model_dump(), "evidence": 20.0})
        with pytest.raises(UnprovenJudgeError, match=r"may be chance.*evidence \d.*JUDGE_EVIDENCE"):
            await score_window(store, asked, thinned)
        requests = judge.requests
        (by,) = await known_judges(store)
        (own,) = await judged_before(store, by, 10)
        assert own.window_id == WINDOW.id
        assert await judged_before(store, by, 10, without=WINDOW.id) == []
        for hour in range(6):
            other = WindowValidity(window_id=f"2025-11-13T0{hour}:00", by=by, groups=own.groups)
            await store_validity(store, other)
        metrics = scored_metrics(await score_window(store, asked, thinned))
        assert judge.requests == requests > 0  # nothing is bought again
    assert metrics["judge_evidence"] >= 20 and metrics["judge_validity"] > 0.8
    assert metrics["judge_agreement_window_low"] < metrics["judge_agreement_window"]
    assert metrics["judge_cached_tokens"] == judge.cached_tokens > 0
    (report,) = await read_validity(store)
    assert len(report.windows) == 7 and report.recent.agreement.trajectories == 35


async def test_scored_windows_teach_a_judge_of_ones_own(store, settings, thinned, tmp_path):
    async with judge_for(settings, noise=0.1) as (_, asked):
        scored = await score_window(store, asked, thinned)
    await set_state(store, thinned.claim, WindowState.SCORED, scored=scored)
    (window,), served = await outcome_windows(store, asked.home, print)
    assert window.window_id == WINDOW.id and len(window.judged) == thinned.artifact.rows
    assert {name: set(own) for name, own in served.items()} == {"loopback, ruler": {WINDOW.id}}
    settings_of = (asked.home, asked.model, asked.judge, asked.training)
    with pytest.raises(WindowNotReadyError, match="1 windows with known outcomes cannot be split"):
        await train_own_judge(store, *settings_of, tmp_path / "j", JudgeTraining(), print)


async def test_play_that_was_taken_down_teaches_no_judge(store, settings, thinned):
    async with judge_for(settings, noise=0.1) as (_, asked):
        scored = await score_window(store, asked, thinned)
    await set_state(store, thinned.claim, WindowState.SCORED, scored=scored)
    (window,), _ = await outcome_windows(store, asked.home, print)
    gone, other, *rest = [one.trajectory for one in window.judged]
    await withhold(store, "trajectory", gone.trajectory_id, "asked")
    await withhold(store, "agent", other.agent_id, "asked")
    (window,), _ = await outcome_windows(store, asked.home, print)
    left = {one.trajectory.trajectory_id for one in window.judged}
    assert left == {one.trajectory_id for one in rest if one.agent_id != other.agent_id} != set()
    for one in rest:
        await withhold(store, "agent", one.agent_id, "asked")
    windows, _ = await outcome_windows(store, asked.home, print)
    assert windows == []


async def test_a_random_judge_trains_nothing(store, settings, thinned):
    async with judge_for(settings, noise=1.0, blind=True) as (_, asked):
        asked = asked.replace(judge={**asked.judge.model_dump(), "evidence": 20.0})
        with pytest.raises(UnprovenJudgeError):
            await score_window(store, asked, thinned)
    assert await list_scores(store, WINDOW.id) == []
