"""Windows with a known ranking, played in the simulator, for ``benchmarks.judge``.

``size`` agents play one scenario of ten ticks. The i-th agent follows the news with probability
``i / (size - 1)`` and otherwise buys a random side of a random market, so skill ranges from chance
to full use of the news. Each agent also gives reasons, whose length is independent of its skill.

**The true ranking is by realised profit in the window, to the cent.** The loopback judge reads this
profit in every prompt, so without noise and bias it ranks exactly by it, with any method.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from babylon.core.game_rows import GameRow
from babylon.core.settings import QualitySettings
from babylon.core.trajectories import Call, Trajectory
from babylon.core.windows import parse_window_id
from babylon.game.market.account import Outcome
from babylon.game.market.amm import Side
from babylon.game.market.game import Game
from babylon.game.market.orders import Decision, render_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Rules, Scenario, make_scenario
from babylon.game.market.scripted import buy
from babylon.quality.row_checks import Accepted, check_row
from babylon.recorder import Action, LlmCall
from babylon.recorder.trajectory import encode_step
from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory

START = datetime(2025, 11, 14, 9, tzinfo=UTC)
TICKS = 10
REASONS = (
    "the headline moves the odds",
    "the price has not caught up yet",
    "the position is small for the balance",
    "the market looks stretched to me",
    "nobody else seems to have noticed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWindow:
    """A window's trajectories in random order, with each one's skill and profit in USD."""

    judged: tuple[JudgedTrajectory, ...]
    truth: GroundTruth
    skill: tuple[float, ...]
    profit_usd: tuple[float, ...]


@cache
def known_window(size: int, seed: int) -> KnownWindow:
    """Return the window of a seed. No two profits are equal."""
    scenario = make_scenario(f"judge:{size}:{seed}", Rules(ticks=TICKS), name=f"s{seed}")
    order = Random(f"order:{size}:{seed}").sample(range(size), size)
    skills = tuple(place / (size - 1) for place in order)
    played = tuple(
        _play(scenario, agent, skill, Random(f"play:{size}:{seed}:{agent}"))
        for agent, skill in enumerate(skills)
    )
    profits = tuple(judged.trajectory.pnl_usd for judged in played)
    assert len(set(profits)) == size, f"window {size}:{seed} has equal profits"
    return KnownWindow(judged=played, truth=_truth(scenario), skill=skills, profit_usd=profits)


def _play(scenario: Scenario, agent: int, skill: float, random: Random) -> JudgedTrajectory:
    game = Game(scenario)
    name = f"agent-{agent}"
    words = random.choice((0, 1, 2, 4))
    turns = []
    while not game.over:
        messages = render_observation(game, name)
        state: dict[str, object] = {
            "agentBalance": game.balance,
            "agentPnL": game.pnl,
            "openPositions": len(game.holdings),
        }
        reply = _reply(decision := _decide(game, skill, random), random.sample(REASONS, words))
        turns.append((messages, state, reply, game.act(decision)))
    profit = round(game.settle(), 2)
    won = [game.won(outcome) for *_, outcome in turns]
    trajectory = Trajectory(
        trajectory_id=f"t{agent}",
        agent_id=name,
        window_id=f"{START:%Y-%m-%dT%H:%M}",
        scenario_id=scenario.scenario_id,
        start=START,
        end=START + timedelta(minutes=TICKS),
        pnl_usd=profit,
        wins=won.count(True),
        trades=len(won) - won.count(None),
        actions=sum(outcome.success for *_, outcome in turns),
        steps=TICKS,
        calls=tuple(
            Call(step=tick, messages=tuple(dict(m) for m in messages), response=reply)
            for tick, (messages, _, reply, _) in enumerate(turns)
        ),
    )
    steps = tuple(
        _step(tick, messages, state, reply, outcome, game)
        for tick, (messages, state, reply, outcome) in enumerate(turns)
    )
    knowledge = {"actualOutcomes": {q.market_id: q.outcome.value for q in scenario.questions}}
    return JudgedTrajectory(trajectory=trajectory, steps=steps, knowledge=knowledge)


def _decide(game: Game, skill: float, random: Random) -> Decision:
    """Follow the news with probability ``skill``, else buy at random; any allowed amount."""
    news = game.scenario.news[game.tick]
    amount = round(random.uniform(25.0, min(game.scenario.rules.max_order, game.balance)), 2)
    if news and random.random() < skill:
        return buy(news.market_id, news.hints, amount)
    question = random.choice(game.scenario.questions)
    return buy(question.market_id, random.choice([*Side]), amount)


def _reply(decision: Decision, reasons: list[str]) -> str:
    order = json.loads(render_decision(decision))
    return json.dumps(order | ({"reasoning": "; ".join(reasons)} if reasons else {}))


def _step(
    tick: int,
    messages: list[dict[str, str]],
    state: dict[str, object],
    reply: str,
    outcome: Outcome,
    game: Game,
) -> dict[str, object]:
    """Return a step as the recorder writes it."""
    side = outcome.side.value if outcome.side else None
    call = LlmCall(
        model="known",
        system_prompt=messages[0]["content"],
        user_prompt=messages[1]["content"],
        response=reply,
        temperature=1.0,
        max_tokens=128,
        purpose="action",
        action_type=outcome.action_type,
    )
    action = Action(
        action_type=outcome.action_type,
        success=outcome.success,
        parameters={"marketId": outcome.market_id, "side": side},
        result={"shares": outcome.shares, "dollars": outcome.dollars},
        error=outcome.error,
        correctness={"predictionCorrect": game.won(outcome)},
    )
    moment = START + timedelta(minutes=tick)
    step: dict[str, object] = json.loads(encode_step(tick, moment, state, [], [call], action, 0.0))
    return step


def _truth(scenario: Scenario) -> GroundTruth:
    """Return the rows of ``market_outcomes`` as the tracker writes them."""
    return GroundTruth(
        outcomes=tuple(
            {
                "predictionMarketId": f"{scenario.scenario_id}:{question.market_id}",
                "question": question.text,
                "outcome": question.outcome.value,
                "finalProbability": float(question.outcome is Side.YES),
            }
            for question in scenario.questions
        )
    )


@cache
def recorded_window(rows: Path) -> KnownWindow:
    """Return the recorded window in a folder of JSON lines, with the rows that ``quality`` accepts.

    Skill is unknown, and therefore 0.
    """
    judged = []
    for values in _lines(rows / "trajectories.jsonl"):
        row = _game_row(values)
        verdict = check_row(row, parse_window_id(row.window_id or ""), QualitySettings())
        if isinstance(verdict, Accepted):
            judged.append(
                JudgedTrajectory(
                    trajectory=verdict.trajectory,
                    steps=tuple(json.loads(row.steps_json)),
                    knowledge=verdict.game_knowledge,
                )
            )
    return KnownWindow(
        judged=tuple(judged),
        truth=GroundTruth(outcomes=tuple(_lines(rows / "market_outcomes.jsonl"))),
        skill=(0.0,) * len(judged),
        profit_usd=tuple(round(one.trajectory.pnl_usd, 2) for one in judged),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _game_row(values: dict[str, Any]) -> GameRow:
    return GameRow(
        trajectory_id=values["trajectoryId"],
        agent_id=values["agentId"],
        window_id=values["windowId"],
        scenario_id=values["scenarioId"],
        start=datetime.fromisoformat(values["startTime"]).replace(tzinfo=UTC),
        end=datetime.fromisoformat(values["endTime"]).replace(tzinfo=UTC),
        total_reward=values["totalReward"],
        final_pnl_usd=values["finalPnL"],
        steps_json=values["stepsJson"],
        metrics_json=values["metricsJson"],
        metadata_json=values["metadataJson"],
        reward_components_json=values["rewardComponentsJson"],
    )
