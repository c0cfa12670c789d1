"""Requests are entered before they are sent, and no schedule spends more than the budget."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.errors import ScoringError
from babylon.scoring.judge.budget import Budget, BudgetLimits, BudgetSpentError, InFlight
from babylon.scoring.judge.judge_client import JudgeClient, Price, RetryLaterError
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import GroundTruth
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.pace import Pace
from babylon.scoring.judge.prompt import SCHEMAS
from benchmarks.judge_faults import run_schedules
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.judged import SCALE, config, kendall, ladder


@asynccontextmanager
async def bench(timeout_s=30.0, model="loopback", concurrency=8, **mind):
    async with (
        LoopbackJudge(Mind(scale=SCALE, **mind)) as judge,
        JudgeClient(
            model=model,
            base_url=judge.base_url,
            timeout_s=timeout_s,
            concurrency=concurrency,
            price=Price(prompt_usd=1.0, completion_usd=2.0),
        ) as client,
    ):
        yield judge, client


async def judge_all(client, count=8, list_size=6, **options):
    options.setdefault("ledger", MemoryJudgments())
    group, worths = ladder(count)
    asked = config(list_size=list_size)
    return worths, await judge_window(client, group, GroundTruth(), asked, **options)


async def test_random_schedules_never_overspend():
    """``python -m benchmarks.judge_faults`` does this with 1,000 schedules."""
    result = await run_schedules(25, seed=1)
    assert result.schedules == 25 and result.finished and result.stopped["BudgetSpentError"]
    assert (result.overspent, result.unentered) == (0, 0)


async def test_a_request_is_charged_whether_its_answer_came_or_not():
    ledger = MemoryJudgments()
    async with bench(timeout_s=0.5, faults={"slow": 1.0}, slow_s=1.0) as (judge, client):
        with pytest.raises(ScoringError, match="timed out"):
            await judge_all(client, 4, ledger=ledger, retries=1)
    assert judge.tokens > 0  # it did the work
    spent = (await ledger.spent()).window
    assert spent.tokens >= judge.tokens and spent.usd > 0
    assert [entry.problem for entry in ledger.entries][:2] == ["sent, and not answered"] * 2


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ((100, 20, 120), (100, 20)),
        ((100, 20, 620), (100, 520)),  # thoughts beside the completion, as xAI counts them
        ((100, 20, 0), (100, 20)),
        ((0, 0, 0), (2, 1)),  # counted here
        ((0, 20, 520), (2, 518)),
    ],
)
async def test_tokens_outside_prompt_and_completion_are_charged_as_well(usage, tokens):
    got = await answered(usage)
    assert (got.prompt_tokens, got.completion_tokens) == tokens


@pytest.mark.parametrize("usage", [(10**12, 1, 0), (1, 10**12, 0), (1, 1, float("inf"))])
async def test_an_answer_with_a_count_that_no_ledger_holds_is_none(usage):
    with pytest.raises(RetryLaterError, match="not a chat completion"):
        await answered(usage)


async def answered(usage):
    """Ask a server that counts the tokens of prompt, completion and both in this way."""

    async def answer(request):
        counts = dict(
            zip(("prompt_tokens", "completion_tokens", "total_tokens"), usage, strict=True)
        )
        message = {"role": "assistant", "content": "Good"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        frame = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response({**frame, "choices": [choice], "usage": counts})

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    async with (
        TestServer(app) as server,
        JudgeClient(model="m", base_url=str(server.make_url("/"))) as client,
    ):
        asked = [{"role": "user", "content": "Judge"}]
        return await client.ask(asked, SCHEMAS["one"], max_tokens=9)


async def test_a_request_that_never_left_costs_nothing():
    ledger = MemoryJudgments()
    async with JudgeClient(model="m", base_url="http://127.0.0.1:9/v1") as client:
        with pytest.raises(ScoringError, match="Connection error"):
            await judge_all(client, 4, ledger=ledger, retries=0)
    assert ledger.entries and (await ledger.spent()).window.tokens == 0


async def test_a_run_that_dies_has_paid_for_what_it_asked():
    ledger = MemoryJudgments()
    async with bench(delay_s=30.0) as (judge, client):
        running = asyncio.create_task(judge_all(client, 4, ledger=ledger))
        while not judge.requests:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert (await ledger.spent()).window.tokens > 0


async def test_a_budget_waits_for_requests_in_flight_before_it_is_spent():
    """The worst cases of all requests at once exceed the limit, the real costs do not."""
    async with bench() as (_, client):
        worths, free = await judge_all(client, 24)
    ledger = MemoryJudgments()
    budget = Budget(window=BudgetLimits(tokens=3 * free.tokens))
    async with bench(delay_s=0.01) as (judge, client):
        _, tight = await judge_all(client, 24, ledger=ledger, budget=budget)
    assert kendall(worths, [one.score for one in tight.scores]) == 1
    assert judge.tokens <= 3 * free.tokens


@pytest.mark.parametrize("later", [False, True])
async def test_judges_of_one_panel_wait_for_each_others_requests(later):
    """The worst cases of both at once exceed the limit, the real costs do not."""
    async with bench() as (_, client):
        _, free = await judge_all(client, 6, list_size=6)
    options = {"budget": Budget(day=BudgetLimits(tokens=4 * free.tokens)), "in_flight": InFlight()}
    ledger = MemoryJudgments()
    async with bench(delay_s=0.1) as (judge, first), bench(model="second") as (_, second):
        running = asyncio.create_task(judge_all(first, 6, ledger=ledger, **options))
        while later and not judge.requests:
            await asyncio.sleep(0.01)
        results = [await judge_all(second, 6, ledger=ledger, **options), await running]
    assert all(kendall(worths, [one.score for one in j.scores]) == 1 for worths, j in results)
    assert {entry.judge for entry in ledger.entries} == {"loopback", "second"}


async def test_what_another_run_has_in_flight_counts():
    ledger = MemoryJudgments()
    budget = Budget(day=BudgetLimits(tokens=20_000))
    async with bench(delay_s=0.05) as (judge, client):
        runs = [judge_all(client, 24, ledger=ledger, budget=budget) for _ in range(3)]
        results = await asyncio.gather(*runs, return_exceptions=True)
    assert judge.tokens <= 20_000
    assert all(isinstance(one, tuple | BudgetSpentError) for one in results)


@pytest.mark.parametrize("prefix", ["openai/", "hosted_vllm/"])
async def test_a_provider_before_the_model_is_left_out_if_the_server_does_not_know_it(prefix):
    async with bench(model=f"{prefix}Qwen/judge") as (judge, client):
        judge.mind = Mind(scale=SCALE, model="Qwen/judge")
        worths, judgments = await judge_all(client, 8)
    assert kendall(worths, [one.score for one in judgments.scores]) == 1
    async with bench(model=f"{prefix}judge") as (judge, client):
        judge.mind = Mind(scale=SCALE, model=f"{prefix}judge")
        await judge_all(client, 4)
        assert client.model == f"{prefix}judge"


async def test_a_known_model_keeps_its_name_after_a_prompt_that_is_too_long():
    async with bench(model="openai/judge") as (judge, client):
        judge.mind = Mind(scale=SCALE, model="openai/judge", context_tokens=700)
        await judge_all(client, 8)
        assert client.model == "openai/judge"


async def test_a_prompt_that_is_too_long_does_not_change_the_field_of_the_limit():
    """Models that think take ``max_completion_tokens`` alone."""
    limits = {"context_tokens": 700, "lacks": frozenset({"max_tokens"})}
    async with bench(**limits) as (_, client):
        worths, judgments = await judge_all(client, 6)
    assert kendall(worths, [one.score for one in judgments.scores]) == 1


async def test_retry_after_holds_every_request():
    """One at a time, because requests that are on their way already cannot be held."""
    limited = {"faults": {"rate_limit": 0.3}, "retry_after_s": 0.05, "seed": 2}
    async with bench(concurrency=1, **limited) as (judge, client):
        worths, judgments = await judge_all(client, 24, list_size=1, retries=20)
    assert judge.faults["rate_limit"] and not judge.early
    assert kendall(worths, [one.score for one in judgments.scores]) == 1


async def test_a_server_that_asks_for_hours_ends_the_run_at_once():
    async with bench(faults={"rate_limit": 1.0}, retry_after_s=86_400.0) as (judge, client):
        with pytest.raises(ScoringError, match=r"429.*wait of 86400 s"):
            await judge_all(client, 4)
    assert judge.requests <= 2  # those that were on their way


async def test_attempts_end_after_the_setting():
    async with bench(faults={"rate_limit": 1.0}, retry_after_s=0.0) as (judge, client):
        with pytest.raises(ScoringError, match="429"):
            await judge_all(client, 4, retries=3)
    assert judge.faults["rate_limit"] == 4


def test_the_pace_keeps_requests_and_tokens_a_minute():
    pace = Pace(requests=60)
    assert [pace.start(10.0, 5) for _ in range(3)] == [10.0, 11.0, 12.0]
    assert pace.start(30.0, 5) == 30.0
    pace = Pace(requests=600, tokens=6000)
    assert [pace.start(0.0, 200) for _ in range(3)] == [0.0, 2.0, 4.0]
    assert [Pace().start(1.0, 10**9) for _ in range(2)] == [1.0, 1.0]


async def test_the_pace_holds_real_requests():
    loop = asyncio.get_running_loop()
    async with bench() as (judge, client):
        started = loop.time()
        await judge_all(client, 24, pace=Pace(requests=1200))
        assert loop.time() - started >= 0.05 * (judge.requests - 1)
