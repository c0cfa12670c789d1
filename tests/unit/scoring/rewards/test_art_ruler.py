"""ART's own RULER as a scorer, against a judge on loopback."""

import importlib
import os
import sys

import pytest

from babylon.core.errors import ConfigError, ScoringError
from babylon.core.llm_calls import Message
from babylon.core.settings import Settings
from babylon.core.trajectories import Call
from babylon.scoring.rewards.art_ruler import art_ruler, as_chat
from babylon.scoring.scorer import Score, ScoringContext, score
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.trajectories import a_trajectory

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of litellm's own


def call(number, question, reply):
    system = Message(role="system", content="You trade.")
    return Call(
        step=number, messages=(system, Message(role="user", content=question)), response=reply
    )


def trajectory(number, pnl_usd, scenario="s"):
    return a_trajectory(
        f"t{number}",
        agent_id=f"a{number}",
        scenario_id=scenario,
        pnl_usd=pnl_usd,
        wins=1,
        trades=2,
        actions=2,
        steps=2,
        calls=(call(0, f"I am a{number}. Buy?", "yes"), call(1, "Sell?", "no")),
    )


async def scored(judge, trajectories):
    settings = Settings(judge={"model": "loopback", "base_url": judge.base_url})
    context = ScoringContext(window_id="w", settings=settings, store=None, artifact=None)
    return [s.value for s in await score("art-ruler", art_ruler, trajectories, context)]


def test_a_trajectory_is_one_chat_that_ends_with_its_result():
    roles = [(message["role"], message["content"]) for message in as_chat(trajectory(1, 12.5))]
    assert roles == [
        ("system", "You trade."),
        ("user", "I am a1. Buy?"),
        ("assistant", "yes"),
        ("user", "Sell?"),
        ("assistant", "no"),
        (
            "user",
            "Result: 2 steps, 2 actions, 1 of 2 decided trades won, P&L in this window $+12.50",
        ),
    ]


def test_a_call_that_repeats_the_conversation_adds_what_is_new():
    first = call(0, "Buy?", "yes")
    told = (*first.messages, Message(role="assistant", content="yes"))
    second = Call(step=1, messages=(*told, Message(role="user", content="Sell?")), response="no")
    own = trajectory(1, 0.0)
    chat = as_chat(
        type(own)(
            **{f: getattr(own, f) for f in own.__struct_fields__ if f != "calls"},
            calls=(first, second),
        )
    )
    assert [message["content"] for message in chat[:-1]] == [
        "You trade.",
        "Buy?",
        "yes",
        "Sell?",
        "no",
    ]


async def test_each_scenario_is_one_prompt_and_scores_come_back_in_order():
    window = [trajectory(1, 500.0), trajectory(2, 0.0, "other"), trajectory(3, -500.0)]
    async with LoopbackJudge() as judge:
        assert await scored(judge, window) == [0.625, 0.5, 0.375]
    assert judge.requests == 2


async def test_a_judge_that_answers_in_order_of_rank_swaps_the_scores_as_art_does():
    async with LoopbackJudge(Mind(faults={"rank_order": 1.0})) as judge:
        assert await scored(judge, [trajectory(1, -500.0), trajectory(2, 500.0)]) == [0.625, 0.375]


async def test_answers_that_art_can_never_read_fail_the_stage():
    async with LoopbackJudge(Mind(faults={"fenced": 1.0})) as judge:
        with pytest.raises(
            ScoringError, match=r"no more than half of 2 trajectories \(ValidationError at .*ruler"
        ):
            await scored(judge, [trajectory(1, -500.0), trajectory(2, 500.0)])


async def test_a_bad_answer_is_asked_for_again():
    for seed in range(40):  # the seed and the prompt decide which answers are bad
        async with LoopbackJudge(Mind(faults={"fenced": 0.3}, seed=seed)) as judge:
            try:
                found = await scored(judge, [trajectory(1, -500.0), trajectory(2, 500.0)])
            except ScoringError:
                continue
        if judge.faults["fenced"] == 1:
            break
    assert judge.requests == 2 and found == [0.375, 0.625]


async def test_a_text_that_the_judge_refuses_costs_its_own_trajectory():
    """The server quotes the prompt and the key in its refusal; the reason quotes neither."""
    window = [trajectory(n, pnl) for n, pnl in enumerate([-500.0, 0.0, 250.0, 500.0])]
    async with LoopbackJudge(Mind(refuses="I am a2.")) as judge:
        settings = Settings(judge={"model": "loopback", "base_url": judge.base_url})
        context = ScoringContext(window_id="w", settings=settings, store=None, artifact=None)
        found = await score("art-ruler", art_ruler, window, context)
    assert [one.value for one in found if isinstance(one, Score)] == [0.375, 0.5, 0.625]
    (lost,) = (one for one in found if not isinstance(one, Score))
    assert (lost.trajectory_id, lost.reason) == ("t2", "no_judgment")
    assert "BadRequestError" in lost.detail and "I am" not in lost.detail


async def test_without_a_judge_it_says_what_to_set():
    context = ScoringContext(window_id="w", settings=Settings(), store=None, artifact=None)
    with pytest.raises(ConfigError, match="JUDGE_MODEL is not set"):
        await score("art-ruler", art_ruler, [trajectory(1, 0.0)], context)


def test_importing_art_takes_nothing_from_a_stray_env_file(tmp_path, monkeypatch):
    from babylon.training.backends.art_client import art, patches

    attribute = "_preprocess_mask_arguments"  # which importing ART replaces
    monkeypatch.setattr(patches.masking_utils, attribute, getattr(patches.masking_utils, attribute))
    (tmp_path / ".env").write_text("STRAY_SETTING=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # then dotenv looks from here upwards
    importlib.reload(art)
    assert "STRAY_SETTING" not in os.environ
    monkeypatch.delenv("PYTHON_DOTENV_DISABLED")
    monkeypatch.setenv("STRAY_SETTING", "of ours")  # so that it is taken away again
    monkeypatch.delenv("STRAY_SETTING")
    importlib.reload(art)
    assert os.environ["STRAY_SETTING"] == "1"  # what it would have done
