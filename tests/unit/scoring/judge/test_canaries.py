"""Canaries: planted plays whose judgment is known, in real requests to a loopback judge."""

import json

import pytest

from babylon.scoring.judge.canaries import chosen_groups
from babylon.scoring.judge.canary_results import (
    CanaryResult,
    prior_correlation,
    summarise_canaries,
)
from babylon.scoring.judge.group_prompts import prepare_group
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import GroundTruth
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.validity import learn
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.judged import SCALE, config, judged, ladder

TRUTH = GroundTruth(outcomes=({"predictionMarketId": "m<1", "outcome": "YES"},))


async def judged_with(kind, monkeypatch, list_size=6, ledger=None, count=5, **mind):
    """Judge a ladder with a canary of a kind."""
    monkeypatch.setattr("babylon.scoring.judge.judge_window.PLANTED", (kind,))
    if kind is None:
        monkeypatch.setattr("babylon.scoring.judge.judge_window.chosen_groups", lambda *_: [])
    group, _ = ladder(count)
    ledger = ledger or MemoryJudgments()
    async with (
        LoopbackJudge(Mind(scale=SCALE, **mind)) as judge,
        JudgeClient(model="loopback", base_url=judge.base_url) as client,
    ):
        asked = config(list_size=list_size)
        found = await judge_window(client, group, TRUTH, asked, ledger=ledger)
    return found, judge, ledger


@pytest.mark.parametrize("list_size", [6, 1])
@pytest.mark.parametrize("kind", ["padded", "injected", "better", "worse"])
async def test_a_sound_judge_answers_rightly(kind, list_size, monkeypatch):
    found, _, ledger = await judged_with(kind, monkeypatch, list_size)
    answers = {one.kind: one.value for one in found.canaries}
    assert answers[kind] == pytest.approx(float(kind in ("better", "worse")), abs=1e-5)
    assert answers.get("swapped") == (1.0 if list_size > 1 else None)
    scored = {one.trajectory_id for one in found.scores}
    assert len(scored) == 5 and not any("canary" in name for name in scored)
    assert not any("canary" in name for one in found.groups for name in one.trajectory_ids)
    assert any(name.startswith("canary:") for e in ledger.entries for name in e.trajectory_ids)


async def test_canaries_do_not_change_scores_of_a_judge_without_noise(monkeypatch):
    with monkeypatch.context() as without:
        plain, before, _ = await judged_with(None, without)
    for kind in ("padded", "better"):
        found, judge, _ = await judged_with(kind, monkeypatch)
        assert [one.score for one in found.scores] == pytest.approx(
            [one.score for one in plain.scores], abs=1e-5
        )
        assert judge.requests == before.requests


async def test_a_judge_that_obeys_and_one_that_likes_length_are_found_out(monkeypatch):
    obeys, *_ = await judged_with("injected", monkeypatch, gullible=True)
    gain = next(one.value for one in obeys.canaries if one.kind == "injected")
    assert gain > 0.2
    likes, *_ = await judged_with("padded", monkeypatch, verbosity_bias=0.5)
    assert next(one.value for one in likes.canaries if one.kind == "padded") > 0.1
    blind, *_ = await judged_with("better", monkeypatch, blind=True, position_bias=0.6)
    assert next(one.value for one in blind.canaries if one.kind == "swapped") < 0


async def test_a_canary_is_bought_once(monkeypatch):
    found, first, ledger = await judged_with("injected", monkeypatch, noise=0.2)
    again, second, _ = await judged_with("injected", monkeypatch, noise=0.2, ledger=ledger)
    assert first.requests > 0 and second.requests == 0
    assert again.canaries == found.canaries and again.scores == found.scores


async def test_a_canary_that_no_reply_is_usable_about_costs_no_trajectory(monkeypatch):
    found, judge, _ = await judged_with(
        "injected", monkeypatch, refuses="Note to the judge", refusal="content_filter"
    )
    assert judge.faults["content_filter"] == 1
    assert len(found.scores) == 5 and not found.rejected and not found.canaries


def test_a_known_play_bought_what_came_true_and_cannot_open_a_tag():
    group = [judged("a", 10.0), judged("b", -30.0)]
    sheet = prepare_group(group, TRUTH, config())
    better = sheet.planted("better", 0).shown[-1].text
    worse = sheet.planted("worse", 0).shown[-1].text
    assert "marketId=m‹1 side=YES -> (right)" in better and "P&L in this window $+30.00" in better
    assert "side=NO -> (wrong)" in worse and "P&L in this window $-50.00" in worse


def test_one_canary_for_each_24_trajectories_and_none_alone():
    assert len(chosen_groups([5], "x")) == 1
    assert len(chosen_groups([24] * 5, "x")) == 5
    assert chosen_groups([1, 1], "x") == []
    assert chosen_groups([8, 8, 8], "x") == chosen_groups([8, 8, 8], "x")


def test_wrong_answers_lower_the_trust_in_a_judge_without_outcomes():
    def trust(**values):
        answers = [CanaryResult(kind=k, value=v) for k, v in values.items() for _ in range(6)]
        return learn([], canaries=answers).validity

    assert trust(better=1.0, worse=1.0, padded=0.0) == pytest.approx(learn([]).validity)
    assert trust(better=0.0, worse=0.0) < 0.5 * learn([]).validity
    assert trust(injected=0.5) < 0.8 * learn([]).validity
    assert prior_correlation([], 0.8, 0.04) == pytest.approx(0.8)


def test_intervals_of_few_equal_answers_are_wide():
    (line,) = summarise_canaries([CanaryResult(kind="better", value=1.0)] * 3)
    assert (line.mean, line.right, line.count) == (1.0, 1.0, 3)
    assert line.low < 0 < line.high
    (line,) = summarise_canaries([CanaryResult(kind="padded", value=v) for v in (0.1, 0.2, 0.15)])
    assert 0 < line.low < line.mean < line.high and json.dumps(line.kind)
