"""Panels and people as judges, with the score stage on a real Postgres and over real HTTP."""

import asyncio
import io
import json
import sys
from dataclasses import replace

import pytest

from babylon.core.errors import ScoringError, WindowNotReadyError
from babylon.core.metrics import scored_metrics
from babylon.core.trajectories import training_rows
from babylon.dataset.scores import read_scores
from babylon.ops.pages.pairs import answer_pair, read_pair
from babylon.scoring.judge import judge_scorers, validity
from babylon.scoring.judge.canary_results import CanaryResult
from babylon.scoring.judge.reported_validity import read_people, read_validity
from babylon.scoring.judge.validity import UnprovenJudgeError
from babylon.stages.score import score_window
from babylon.store import Store
from babylon.store.judge_validity import WindowValidity, judges_of, store_validity
from babylon.store.judgments import spent_by_day
from babylon.store.people import PairAnswer, read_answers, store_answer
from babylon.store.published import withhold
from babylon.store.scores import list_scores
from tests.integration.game import WINDOW
from tests.integration.test_judge import _cli, judge_for, thinned  # noqa: F401


async def test_a_judge_of_a_panel_waits_for_what_the_others_have_in_flight(
    store,
    settings,
    thinned,  # noqa: F811
):
    """Their worst cases together exceed the limit, and what they really cost does not."""
    async with judge_for(settings, delay_s=0.3) as (judge, asked):
        asked = asked.replace(judge={"panel": "second", "day_tokens": 11_000})
        metrics = scored_metrics(await score_window(store, asked, thinned))
    assert metrics["judge_panel_failed"] == 0 and judge.tokens < 11_000


async def answer_all(store, person="ann"):
    """Answer every pair by profit, as a person at the terminal does."""
    count = 0
    while (pair := await read_pair(store, person, WINDOW.id)) is not None:
        first, second = pair.plays
        better = max(pair.plays, key=lambda play: play.pnl_usd).trajectory_id
        names = (first.trajectory_id, second.trajectory_id)
        await answer_pair(store, person, WINDOW.id, *names, better, "it earned more")
        count += 1
    return count


async def test_two_judges_are_combined_and_a_third_that_fails_is_left_out(store, settings, thinned):  # noqa: F811
    async with judge_for(settings, noise=0.1) as (judge, asked):
        away = "away@http://127.0.0.1:9/v1"
        asked = asked.replace(judge={"panel": f"second=2/10,{away}", "retries": 0})
        scored = await score_window(store, asked, thinned)
        requests = judge.requests
        again = await score_window(store, asked, thinned)
        dearer = asked.replace(judge={"panel": f"second=3/12,{away}", "prompt_usd": 9.0})
        await score_window(store, dearer, thinned)
        assert judge.requests == requests  # other prices buy nothing again
    metrics = scored_metrics(scored)
    assert metrics["judge_panel"] == "loopback 0.50, second 0.50"
    assert metrics["judge_panel_failed"] == 1 and metrics["judge_disagreement"] < 1
    assert scored_metrics(again)["judge_panel"] == metrics["judge_panel"]
    rows = await list_scores(store, WINDOW.id)
    assert all(set(row.components) == {"loopback", "second"} for row in rows)
    assert any(reason.startswith("second: ") for row in rows for reason in row.reasons)
    judges = {one.by.judge: one for one in await read_validity(store)}
    assert set(judges) == {"loopback", "second", "panel: loopback + second"}
    assert all(report.canaries for report in judges.values())
    paid = {
        row["judge"]: (row["usd"], row["asked"] * asks / 1e6 + row["written"] * writes / 1e6)
        for asks, writes, name in ((1.0, 4.0, "loopback"), (2.0, 10.0, "second"))
        for row in await store.pool.fetch(
            "SELECT judge, sum(usd) AS usd, sum(prompt_tokens) AS asked,"
            " sum(completion_tokens) AS written FROM babylon.judgments WHERE judge = $1 GROUP BY 1",
            name,
        )
    }
    assert set(paid) == {"loopback", "second"}
    assert all(usd > 0 and usd == pytest.approx(expected) for usd, expected in paid.values())


async def test_a_judge_that_hangs_costs_itself_and_not_the_window(store, settings, thinned):  # noqa: F811
    async with judge_for(settings) as (_, asked), judge_for(settings, delay_s=30) as (hangs, _):
        asked = asked.replace(judge={"panel": f"slow@{hangs.base_url}", "timeout_s": 8.0})
        scored = await score_window(store, asked, thinned)
    metrics = scored_metrics(scored)
    assert metrics["judge_panel"] == "loopback 1.00" and metrics["judge_panel_failed"] == 1


async def test_a_panel_of_which_all_fail_is_an_error(store, settings, thinned):  # noqa: F811
    async with judge_for(settings, key="right") as (_, asked):
        asked = asked.replace(judge={"panel": "second", "api_key": "wrong", "retries": 0})
        with pytest.raises(ScoringError, match="Incorrect API key"):
            await score_window(store, asked, thinned)


async def test_answers_of_people_enter_the_panel_and_no_dataset(store, settings, thinned):  # noqa: F811
    async with judge_for(settings, noise=0.1) as (_, asked):
        first = await score_window(store, asked, thinned)
        answered = await answer_all(store)
        assert answered >= first.artifact.rows
        assert len(await read_answers(store, [WINDOW.id], "ann")) == answered
        scored = await score_window(store, asked, thinned)
    assert scored_metrics(scored)["judge_panel"].startswith("loopback 0.")
    assert "people 0." in scored_metrics(scored)["judge_panel"]
    (ann,) = await read_people(store)
    assert (ann.person, ann.pairs, ann.right) == ("ann", answered, 1.0)
    columns = await read_scores(store, WINDOW.id)
    assert all(row["judge_model"] == "loopback" for row in columns.values())
    assert not any("person" in row.judge for row in await spent_by_day(store))
    learnt = repr(training_rows(settings.home, scored.artifact))
    assert "canary" not in learnt and "earned more" not in learnt


async def test_two_clicks_at_the_same_time_are_one_answer(store: Store) -> None:
    given = PairAnswer(
        window_id=WINDOW.id, scenario_id="s", person="ann", better="a", worse="b", first="a"
    )
    await asyncio.gather(*(store_answer(store, given) for _ in range(4)))
    assert await read_answers(store) == [given]
    turned = replace(given, better="b", worse="a")
    await store_answer(store, turned)
    assert await read_answers(store) == [turned]


async def test_an_answer_about_other_plays_is_refused(store, settings, thinned):  # noqa: F811
    with pytest.raises(WindowNotReadyError, match="no judge has judged window"):
        await read_pair(store, "ann", WINDOW.id)
    async with judge_for(settings) as (_, asked):
        await score_window(store, asked, thinned)
    pair = await read_pair(store, "ann")
    one = pair.plays[0].trajectory_id
    for names in ((one, "other", one), (one, one, one), (one, pair.plays[1].trajectory_id, "x")):
        with pytest.raises(WindowNotReadyError, match="no judged group"):
            await answer_pair(store, "ann", WINDOW.id, *names, "")
    assert not await read_answers(store)


async def test_play_that_was_taken_down_is_shown_to_nobody(store, settings, thinned):  # noqa: F811
    async with judge_for(settings) as (_, asked):
        scored = await score_window(store, asked, thinned)
    gone = (await read_pair(store, "ann")).plays[0].trajectory_id
    await withhold(store, "trajectory", gone, "asked")
    shown = set()
    while (pair := await read_pair(store, "ann", WINDOW.id)) is not None:
        names = [play.trajectory_id for play in pair.plays]
        shown.update(names)
        await answer_pair(store, "ann", WINDOW.id, *names, names[0], "")
    assert len(shown) == scored.artifact.rows - 1 and gone not in shown


async def test_a_pair_is_shown_with_the_outcomes_of_a_shorter_window(
    store,
    settings,
    thinned,  # noqa: F811
    monkeypatch,
):
    async with judge_for(settings) as (_, asked):
        await score_window(store, asked, thinned)
    await store.pool.execute("UPDATE babylon.windows SET minutes = 30")
    read = []

    async def outcomes(_, window):
        read.append(window.minutes)
        return []

    monkeypatch.setattr("babylon.ops.pages.pairs.window_outcomes", outcomes)
    assert await read_pair(store, "ann") is not None and read == [30]


async def test_canaries_are_stored_reported_and_never_scored(store, settings, thinned):  # noqa: F811
    async with judge_for(settings, noise=0.05) as (_, asked):
        scored = await score_window(store, asked, thinned)
    (report,) = await read_validity(store)
    assert {line.kind for line in report.canaries} >= {"swapped"} and len(report.canaries) == 2
    assert report.windows[0].canaries
    names = [name for name in scored_metrics(scored) if name.startswith("judge_canary_")]
    assert len(names) == 2
    asked_about = await store.pool.fetchval(
        "SELECT count(*) FROM babylon.judgments, unnest(trajectory_ids) AS n"
        " WHERE starts_with(n, 'canary:')"
    )
    assert asked_about == 1
    assert not any("canary" in row.trajectory_id for row in await list_scores(store, WINDOW.id))
    assert not any("canary" in name for name in await read_scores(store, WINDOW.id))


async def test_pairs_are_asked_in_the_terminal(
    store,
    settings,
    thinned,  # noqa: F811
    monkeypatch,
    capsys,
):
    async with judge_for(settings) as (_, asked):
        await score_window(store, asked, thinned)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("what\n2 it waited\n1\nq\n"))

    async def told(*command):
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(_cli, ["judge", *command])
        assert not ended.value.code
        return capsys.readouterr().out

    shown = await told("pairs", "--person", "bob")
    assert "Which is better" in shown and "2 answers stored" in shown and "Play 2: " in shown
    assert json.loads(await told("pairs", "--person", "bob", "--json"))["answered"] == 2
    shown = await told("validity")
    assert "bob" in shown and "swapped" in shown
    (first, _) = await read_answers(store, [WINDOW.id], "bob")
    reasons = await store.pool.fetchval(
        "SELECT explanations FROM babylon.judgments WHERE judge = 'person:bob'"
        " ORDER BY judgment_id LIMIT 1"
    )
    assert reasons == ["it waited"] * 2 and first.better != first.first


@pytest.mark.parametrize("kind", ["panel", "canaries"])
async def test_evidence_of_the_last_windows_alone_proves_nothing(
    store,
    settings,
    thinned,  # noqa: F811
    monkeypatch,
    kind,
):
    """An uninformed judge is lucky in thirty neighbouring windows, if one waits long enough."""
    async with judge_for(settings, noise=0.1) as (_, asked):
        if kind == "panel":
            asked = asked.replace(judge={"panel": "second=2/10"})
        else:  # as if all plays had earned the same
            for place in (judge_scorers, validity):
                monkeypatch.setattr(place, "has_outcomes", lambda groups: False)
        await score_window(store, asked, thinned)
        rows = await judges_of(store, WINDOW.id)
        right = [CanaryResult(kind="better", value=1.0)]
        for hour in range(validity.WINDOWS):
            name = f"2025-11-{12 + hour // 24}T{hour % 24:02}:00"
            for row in rows:
                if not row.by.judge.startswith("panel"):
                    own = WindowValidity(
                        window_id=name, by=row.by, groups=row.groups, canaries=right
                    )
                    await store_validity(store, own)
        asked = asked.replace(judge={**asked.judge.model_dump(), "evidence": 20.0})
        await score_window(store, asked, thinned)

        wrong = [CanaryResult(kind="better", value=-1.0)] * 20
        by = rows[-1].by  # the panel's opinion is stored last
        long_ago = WindowValidity(
            window_id="2025-01-01T00:00", by=by, groups=(), canaries=wrong, log_e=(-200.0,) * 3
        )
        await store_validity(store, long_ago)
        with pytest.raises(UnprovenJudgeError):
            await score_window(store, asked, thinned)
