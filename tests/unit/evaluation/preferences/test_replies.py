"""Which prompts are answered again, and what replies are worth."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.preferences import sample
from babylon.evaluation.preferences.choose import DecisionPoint, informative
from babylon.evaluation.preferences.play_on import value_replies
from babylon.evaluation.preferences.sample import sample_replies
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.market.game import Game
from babylon.game.market.orders import parse_decision
from babylon.scoring.rewards.heuristic import FAILURE_USD
from babylon.serving.engine.loaded_policies import load
from tests.deciding_policy import DECISIONS, save_deciding_policy
from tests.worlds import quiet_world

HOLD, YES, NO = DECISIONS
SELL = YES.replace("buy_yes", "sell")


def call(step: int, response: str = HOLD, **changes: object) -> Call:
    given: dict[str, object] = {
        "step": step,
        "messages": (),
        "response": response,
        "prompt_token_ids": (1, 2, 3 + step),
        "completion_token_ids": (5, 6),
        "logprobs": (-0.5, -0.5),
    }
    return Call(**given | changes)  # type: ignore[arg-type]


def row(name: str, *calls: Call, rewards: dict[int, float] | None = None) -> TrainingRow:
    return TrainingRow(
        trajectory_id=name,
        agent_id=name,
        scenario_id="s",
        score=0.0,
        calls=calls,
        rewards=rewards or {},
    )


def test_moments_whose_rewards_differ_most_come_first_and_each_once() -> None:
    rows = [
        row("a", call(0), call(1), call(2, YES), rewards={0: 0.0, 1: 0.1, 2: 0.0}),
        row("b", call(0), call(1), call(2, NO), rewards={0: 0.0, 1: 0.9, 2: 0.0}),
    ]
    points = informative(rows, 6)
    assert [(p.trajectory_id, p.call.step) for p in points[:3]] == [("a", 1), ("a", 2), ("a", 0)]
    assert [p.trajectory_id for p in points[3:]] == ["b"] * 3
    assert informative(rows, 2) == points[:2]


def test_of_a_steps_calls_one_is_answered_again() -> None:
    """Replies are stored by step: a second call would replace the first one's, and a run that
    resumes would sample, and pay a judge, again."""
    surprising = call(0, NO, logprobs=(-2.0, -2.0))
    points = informative([row("a", call(0), surprising, call(1)), row("b", call(0))], 9)
    asked = [(point.trajectory_id, point.call.step) for point in points]
    assert sorted(asked) == [("a", 0), ("a", 1), ("b", 0)]
    assert next(p.call for p in points if p.call.step == 0) == surprising


def test_calls_without_exact_prompts_are_not_answered_again() -> None:
    unusable = [
        call(0, prompt_token_ids=None),
        call(1, untrainable="cut"),
        call(2, tools=({"type": "function"},)),
    ]
    assert informative([row("a", *unusable)], 9) == []


def test_of_a_moments_agents_the_most_surprising_reply_is_taken() -> None:
    rows = [row("a", call(0)), row("b", call(0, logprobs=(-3.0, -3.0)))]
    assert [p.trajectory_id for p in informative(rows, 2)] == ["b", "a"]


def played(*replies: str) -> RecordedScenario:
    """A world that resolves YES, and an agent's replies in it."""
    world = quiet_world(ticks=len(replies))
    game = Game(world, "agent")
    for reply in replies:
        game.act(parse_decision(reply))
    game.settle()
    play = RecordedPlay(trajectory_id="t", agent_id="agent", replies=replies, pnl_usd=game.pnl)
    return RecordedScenario(window_id="w", scenario=world, plays=(play,))


def point(step: int, response: str) -> DecisionPoint:
    return DecisionPoint(
        trajectory_id="t",
        agent_id="agent",
        scenario_id="quiet",
        call=call(step, response),
        disagreement=(0.0, 0.0, 0.0),
    )


def test_a_reply_is_worth_the_play_with_it_and_all_else_as_it_was() -> None:
    recorded = played(HOLD, YES, HOLD)
    (values,) = value_replies([recorded], [point(0, HOLD)], [[HOLD, YES, NO, "nonsense", SELL]])
    assert values is not None
    hold, yes, no, malformed, refused = values
    assert hold == pytest.approx(recorded.plays[0].pnl_usd)
    assert malformed == refused == pytest.approx(no - FAILURE_USD)  # it holds nothing to sell
    assert yes > hold > no
    twice = played(YES, YES, HOLD)
    assert yes == pytest.approx(twice.plays[0].pnl_usd)


def test_what_cannot_be_played_again_has_no_value() -> None:
    recorded = played(HOLD, YES)
    texts = [[HOLD, YES]]
    assert value_replies([recorded], [point(0, YES)], texts) == [None]  # not what it acted by
    assert value_replies([replace(recorded, prices="seen")], [point(0, HOLD)], texts) == [None]
    assert value_replies([], [point(0, HOLD)], texts) == [None]


def test_replies_are_sampled_from_the_policy_and_repeatable(tmp_path: Path) -> None:
    path = str(save_deciding_policy(tmp_path / "policy"))
    points = [point(0, HOLD), point(1, HOLD)]
    first = sample_replies(path, points, 6, 1.0, seed=0)
    assert first == sample_replies(path, points, 6, 1.0, seed=0)
    assert first != sample_replies(path, points, 6, 1.0, seed=1)
    texts = [one.text for replies in first for one in replies]
    assert {text for text in texts if text} & set(DECISIONS)
    assert all(one.token_ids[-1] == 258 for replies in first for one in replies)  # ended
    alone = sample_replies(path, points[1:], 6, 1.0, seed=0)
    assert alone == first[1:]


def test_a_lower_temperature_gives_fewer_different_replies(tmp_path: Path) -> None:
    path = str(save_deciding_policy(tmp_path / "policy"))

    def different(temperature: float) -> int:
        (replies,) = sample_replies(path, [point(0, HOLD)], 24, temperature, seed=0)
        return len({one.token_ids for one in replies})

    assert different(0.5) < different(1.5)


def test_replies_are_sampled_above_a_base_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kinds = str(save_deciding_policy(tmp_path / "policy")), list[set[torch.dtype]]()

    def loaded(*arguments: Any) -> Any:
        policy = load(*arguments)
        kinds.append({weight.dtype for weight in policy.model.model.layers.parameters()})
        return policy

    monkeypatch.setattr(sample, "load", loaded)
    (replies,) = sample_replies(path, [point(0, HOLD)], 24, 1.0, 0, "bf16")
    assert kinds == [{torch.bfloat16}]
    assert {one.text for one in replies} & set(DECISIONS)
