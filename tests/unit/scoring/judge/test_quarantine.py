"""One trajectory that cannot be judged costs only itself, and no error says what it holds."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.errors import ScoringError
from babylon.scoring.judge import judge_window as judge_module
from babylon.scoring.judge.judge_client import (
    JudgeClient,
    RequestRefusedError,
    RetryLaterError,
)
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import GroundTruth
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.prompt import SCHEMAS
from benchmarks.judge_faults import KEY, PROMPT, TRUTH, fuzz_replies
from benchmarks.loopback_judge import REFUSALS, LoopbackJudge, Mind
from tests.judged import SCALE, config, judged, kendall, ladder, step

LIST_SIZES = [6, 1]
BAD = f"unspeakable {PROMPT}"


@asynccontextmanager
async def bench(**mind):
    async with (
        LoopbackJudge(Mind(scale=SCALE, key=KEY, **mind)) as judge,
        JudgeClient(model="loopback", base_url=judge.base_url, api_key=KEY) as client,
    ):
        yield judge, client


async def judge_all(client, group, list_size=6, ledger=None, retries=0, **changes):
    truth = GroundTruth(outcomes=({"question": TRUTH},))
    ledger = ledger or MemoryJudgments()
    return await judge_window(
        client, group, truth, config(list_size=list_size, **changes), ledger=ledger, retries=retries
    )


def with_bad(count, *bad):
    """A ladder in which the items ``bad`` say what the server refuses."""
    group, worths = ladder(count)
    for item in bad:
        group[item] = judged(f"bad{item}", worths[item], [step(0, said=BAD)])
    return group, worths


@pytest.mark.parametrize("list_size", LIST_SIZES)
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_the_refused_trajectory_is_singled_out_and_the_rest_is_judged(list_size, refusal):
    group, worths = with_bad(12, 3, 7)
    ledger = MemoryJudgments()
    async with bench(refuses="unspeakable", refusal=refusal) as (judge, client):
        judgments = await judge_all(client, group, list_size, ledger)
        asked = judge.requests
        assert judge.faults[refusal]
        spent = await ledger.spent()
        again = await judge_all(client, group, list_size, ledger)  # refusals are remembered
        assert (judge.requests, await ledger.spent()) == (asked, spent)
        assert again.rejected == judgments.rejected
    assert {one.trajectory_id for one in judgments.rejected} == {"t-bad3", "t-bad7"}
    reason = "no_judgment" if refusal == "silence" else "judge_refused"
    assert {one.reason for one in judgments.rejected} == {reason}
    kept = [worth for item, worth in enumerate(worths) if item not in (3, 7)]
    assert kendall(kept, [one.score for one in judgments.scores]) > 0.9


async def test_refused_prompts_leave_less_room_for_readings():
    group, _ = with_bad(5, 2)
    async with bench(refuses="unspeakable", noise=0.4) as (judge, client):
        judgments = await judge_all(client, group)
    shown = sum(prompt.count("<trajectory id=") for prompt in judge.prompts)
    assert len(judgments.scores) == 4 and shown < 5 * 5 + 4


@pytest.mark.parametrize("list_size", LIST_SIZES)
async def test_of_two_the_one_that_can_be_judged_is_judged(list_size):
    group, _ = with_bad(2, 0)
    async with bench(refuses="unspeakable") as (_, client):
        judgments = await judge_all(client, group, list_size)
    assert [one.trajectory_id for one in judgments.rejected] == ["t-bad0"]
    assert [one.trajectory_id for one in judgments.scores] == ["t-1"]


@pytest.mark.parametrize(
    "steps",
    [
        [step(0, said='{"reasoning": "to the moon \\ud83d"}')],
        [step(0, said='{"reasoning":' + "[" * 1200 + "]" * 1200 + "}")],
        [step(0, said="hold \ud83d\udc4d\udc4d")],
        [step(0) | {"providerAccesses": "none"}],
        [step(0) | {"providerAccesses": [None, {"data": {"a": 1}}]}],
    ],
)
async def test_odd_text_is_judged_like_any_other(steps):
    group, worths = ladder(6)
    group[2] = judged("odd", worths[2], steps)
    async with bench() as (_, client):
        judgments = await judge_all(client, group)
    assert judgments.rejected == ()
    assert kendall(worths, [one.score for one in judgments.scores]) == 1


async def test_a_trajectory_that_cannot_be_written_down_is_lost_alone():
    nested = []
    for _ in range(3000):
        nested = [nested]
    group, worths = ladder(6)
    group[2] = judged("deep", worths[2], [step(0, result={"a": nested})])
    group[4] = judged("odd", worths[4], [{"llmCalls": 7}])
    async with bench() as (_, client):
        judgments = await judge_all(client, group)
    lost = {one.trajectory_id: one.reason for one in judgments.rejected}
    assert lost == {"t-deep": "not_readable", "t-odd": "not_readable"}
    assert len(judgments.scores) == 4


@pytest.mark.parametrize("list_size", LIST_SIZES)
async def test_a_cut_answer_is_no_answer(list_size):
    group, worths = ladder(12)
    async with bench(faults={"cut": 0.4}, seed=1) as (judge, client):
        judgments = await judge_all(client, group, list_size)
    assert judge.faults["cut"]
    judged_worths = dict(zip([f"t-{i}" for i in range(12)], worths, strict=True))
    expected = [judged_worths[one.trajectory_id] for one in judgments.scores]
    assert kendall(expected, [one.score for one in judgments.scores]) > 0.7
    ledger = MemoryJudgments()
    async with bench(faults={"cut": 1.0}) as (_, client):
        with pytest.raises(
            ScoringError, match=r"no usable judgment of 4 of 4.*ended at its limit of \d+"
        ):
            await judge_all(client, ladder(4)[0], list_size, ledger)
    assert not any(entry.scores for entry in ledger.entries)


async def test_thoughts_that_were_cut_ask_for_an_allowance_which_is_sent(monkeypatch):
    async with bench(faults={"cut_thoughts": 1.0}) as (_, client):
        with pytest.raises(ScoringError, match=r"thinks before it answers.*JUDGE_REASONING_TOKENS"):
            await judge_all(client, ladder(4)[0])
        with pytest.raises(ScoringError, match="no usable judgment of 4 of 4"):
            await judge_all(client, ladder(4)[0], reasoning_tokens=5000)
    plain, thinking = config(), config(reasoning_tokens=5000)
    assert thinking.completion_tokens(6) - plain.completion_tokens(6) == 5000


async def test_a_judge_that_is_never_usable_fails_before_it_costs_much():
    async with bench(faults={"malformed": 1.0}) as (judge, client):
        with pytest.raises(ScoringError, match="30 replies in a row cannot be used"):
            await judge_all(client, ladder(64)[0])
    assert judge.requests < 60


async def test_to_remember_that_the_server_gave_no_answer_costs_nothing():
    ledger = MemoryJudgments()
    async with bench(refuses="unspeakable", refusal="silence") as (_, client):
        await judge_all(client, with_bad(6, 2)[0], ledger=ledger, retries=1)
    silent = [one for one in ledger.entries if "gives no answer" in (one.problem or "")]
    assert {len(one.trajectory_ids) for one in silent} >= {1, 6}
    assert not any(one.prompt_tokens + one.completion_tokens + one.usd for one in silent)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refused_everything_is_asked_again_when_it_is_repaired(refusal):
    ledger, (group, _) = MemoryJudgments(), ladder(8)
    async with bench(refuses="trajectory", refusal=refusal) as (_, client):
        with pytest.raises(ScoringError, match=r"8 (judge_refused|no_judgment)"):
            await judge_all(client, group, ledger=ledger)
    async with bench() as (_, client):
        judgments = await judge_all(client, group, ledger=ledger)
    assert (len(judgments.scores), judgments.rejected) == (8, ())


async def test_refusals_of_a_run_that_died_are_forgotten_when_a_later_run_fails(monkeypatch):
    def dies(*arguments):
        raise asyncio.CancelledError

    ledger, (group, _) = MemoryJudgments(), ladder(8)
    async with bench(refuses="trajectory") as (_, client):
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(judge_module, "_require_majority", dies)
            await judge_all(client, group, ledger=ledger)
    async with bench() as (judge, client):
        with pytest.raises(ScoringError, match="8 judge_refused"):
            await judge_all(client, group, ledger=ledger)
        assert not judge.requests
        judgments = await judge_all(client, group, ledger=ledger)
    assert (len(judgments.scores), judgments.rejected) == (8, ())


@pytest.mark.parametrize("fault", ["malformed", "cut"])
async def test_blocks_that_a_failed_stage_split_are_asked_whole_again(fault):
    ledger, (group, _) = MemoryJudgments(), ladder(6)
    async with bench(faults={fault: 1.0}) as (_, client):
        with pytest.raises(ScoringError, match="6 no_judgment"):
            await judge_all(client, group, ledger=ledger)
    async with bench() as (judge, client):
        await judge_all(client, group, ledger=ledger)
    assert [prompt.count("<trajectory id=") for prompt in judge.prompts] == [6, 6]


async def test_a_server_that_is_down_fails_the_window_and_blames_no_trajectory():
    async with bench(faults={"server_error": 1.0}) as (judge, client):
        with pytest.raises(ScoringError, match=r"judge loopback at .*500"):
            await judge_all(client, ladder(24)[0])
    assert judge.requests <= 2 * 5 + 5


async def test_a_server_that_is_down_is_probed_once_for_all_blocks():
    async with (
        LoopbackJudge(Mind(scale=SCALE, faults={"server_error": 1.0})) as judge,
        JudgeClient(model="m", base_url=judge.base_url, concurrency=1) as client,
    ):
        with pytest.raises(ScoringError, match=r"judge m at .*500"):
            await judge_all(client, ladder(24)[0], list_size=1)
    assert judge.requests == 24 + 1


MARKERS = (TRUTH, PROMPT, KEY, "KEYMARKER")


@pytest.mark.parametrize("list_size", LIST_SIZES)
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_no_error_log_or_reason_tells_prompt_truth_or_key(list_size, refusal, caplog):
    caplog.set_level(logging.DEBUG, logger="babylon")
    ledger = MemoryJudgments()
    told = []
    for bad in ((0,), tuple(range(6))):
        group, _ = with_bad(6, *bad)
        async with bench(refuses="unspeakable", refusal=refusal) as (_, client):
            try:
                judgments = await judge_all(client, group, list_size, ledger)
                told += [one.detail for one in judgments.rejected]
            except ScoringError as error:
                while error is not None:  # a traceback shows causes too
                    told.append(str(error))
                    error = error.__cause__ or (
                        None if error.__suppress_context__ else error.__context__
                    )
    told += [entry.problem or "" for entry in ledger.entries]
    told += [record.getMessage() for record in caplog.records if record.name.startswith("babylon")]
    assert len(told) > 4
    assert not [line for line in told if any(marker in line for marker in MARKERS)]


async def test_a_wrong_key_is_not_told():
    wrong = "sk-WRONGWRONGWRONG" + "é"
    for key in (wrong[:-1], wrong):
        async with (
            LoopbackJudge(Mind(scale=SCALE, key=KEY)) as judge,
            JudgeClient(model="m", base_url=judge.base_url, api_key=key) as client,
        ):
            with pytest.raises(ScoringError, match="or the key") as refused:
                await judge_all(client, ladder(4)[0])
        assert "WRONG" not in str(refused.value)


async def test_fuzzed_replies_fail_no_window_and_leak_nothing():
    """``python -m benchmarks.judge_faults`` does this with 10,000 replies."""
    result = await fuzz_replies(150)
    assert result.replies == 150 and result.windows == 3
    assert (result.failed, result.lost, result.leaks) == (0, 0, 0)
    assert result.rejected["judge_refused"] and result.rejected["malformed_json"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", "<html>busy</html>"),
        ("application/json", '{"choices": [{"mess'),
        ("application/json", "[]"),
        ("application/json", '{"choices": "x"}'),
        ("application/json", '{"choices": [{"message": {"content": [7]}}]}'),
        ("application/json", '{"choices": [], "usage": {"prompt_tokens": "many"}}'),
    ],
)
async def test_an_answer_200_that_is_no_completion_is_asked_for_again_and_charged(kind, body):
    async def answer(request):
        return web.Response(text=body, content_type=kind)

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    async with (
        TestServer(app) as server,
        JudgeClient(model="m", base_url=str(server.make_url("/"))) as client,
    ):
        with pytest.raises(RetryLaterError, match="not a chat completion") as failure:
            await client.ask([{"role": "user", "content": "Judge."}], SCHEMAS["list"], max_tokens=9)
    assert failure.value.charged


async def test_a_refusal_whose_body_is_no_text_can_be_stored():
    async def refuse(request):
        return web.Response(status=400, body=b"bad\x00gateway", content_type="text/plain")

    app = web.Application()
    app.router.add_post("/chat/completions", refuse)
    async with (
        TestServer(app) as server,
        JudgeClient(model="m", base_url=str(server.make_url("/"))) as client,
    ):
        with pytest.raises(RequestRefusedError, match="bad gateway"):  # Postgres takes no NUL
            await client.ask([{"role": "user", "content": "?"}], SCHEMAS["one"], max_tokens=9)


@pytest.mark.parametrize("wait", ["Fri, 31 Dec 99999999999999999999 23:59:59 GMT", "nan", "-inf"])
async def test_a_wait_that_no_clock_knows_is_none(wait):
    async def refuse(request):
        return web.Response(status=429, headers={"Retry-After": wait})

    app = web.Application()
    app.router.add_post("/chat/completions", refuse)
    async with (
        TestServer(app) as server,
        JudgeClient(model="m", base_url=str(server.make_url("/"))) as client,
    ):
        with pytest.raises(RetryLaterError) as failure:
            await client.ask([{"role": "user", "content": "?"}], SCHEMAS["one"], max_tokens=9)
    assert failure.value.limited and failure.value.after_s is None
