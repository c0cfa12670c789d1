"""A fleet that plays: LLM agents through an ordinary ``openai`` client, or scripted ones.

Agents are dealt into scenarios of a few; a scenario lasts at most ten ticks of one game minute,
then the next round begins. What they do is written by the recorder as the live game's own rows.
Time is simulated (a past window is played as fast as it goes) or real (one tick a minute).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import pairwise
from random import Random
from uuid import uuid4

import openai

from babylon.clock import sleep_until
from babylon.errors import ServingError
from babylon.market.amm import Pool, Side
from babylon.market.game import Game, Outcome
from babylon.market.orders import MAX_REPLY_TOKENS, Decision, parse_decision, render_decision
from babylon.market.prompts import render_observation
from babylon.market.scenario import Rules, Scenario, make_scenario
from babylon.market.transcripts import draw_agent
from babylon.recorder import Action, LlmCall, MarketOutcomesTracker, TrajectoryRecorder
from babylon.windows import window_at

TICK = timedelta(minutes=1)
MAX_TICKS = 10
TEMPERATURE = 1.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Who plays when. ``duration_min`` in game minutes, one decision a minute and agent.

    Trajectory ids begin with ``fleet_id``, so that fleets of one hour and seed stand side by side;
    with a given one the same plan makes the same rows again.
    """

    start: datetime
    duration_min: int
    agents: int
    agents_per_scenario: int = 8
    seed: int = 0
    live: bool = False  # wait for the real clock
    window_minutes: int = 60
    fleet_id: str = field(default_factory=lambda: uuid4().hex[:12])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """What a fleet came to; P&L in simulator dollars."""

    windows: tuple[str, ...]
    scenarios: int
    trajectories: int
    calls: int
    mean_pnl: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An agent's answer to one observation."""

    text: str
    model: str
    model_version: str | None = None
    latency_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything an answerer may use: who asks, in which step of which trajectory, and the game."""

    agent_id: str
    trajectory_id: str
    step: int
    messages: list[dict[str, str]]
    game: Game


Answer = Callable[[Turn], Awaitable[Reply]]


def llm_answers(client: openai.AsyncOpenAI, model: str, seed: int) -> Answer:
    """Ask an OpenAI-compatible endpoint; identity travels in headers. Each call is seeded, so that
    an engine that honours seeds repeats the play."""

    async def answer(turn: Turn) -> Reply:
        started = time.monotonic()
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=turn.messages,  # type: ignore[arg-type]
                temperature=TEMPERATURE,
                max_tokens=MAX_REPLY_TOKENS,
                seed=call_seed(seed, turn),
                extra_headers={
                    "x-babylon-agent": turn.agent_id,
                    "x-babylon-trajectory": turn.trajectory_id,
                    "x-babylon-step": str(turn.step),
                },
            )
        except openai.OpenAIError as error:
            raise ServingError(
                f"{turn.agent_id} got no answer from {client.base_url}: {error};"
                " is `babylon serve` (or `babylon up`) running there?"
            ) from error
        completion = raw.parse()
        return Reply(
            text=completion.choices[0].message.content or "",
            model=completion.model,
            model_version=raw.headers.get("x-model-version"),
            latency_ms=round((time.monotonic() - started) * 1000),
        )

    return answer


def call_seed(seed: int, turn: Turn) -> int:
    """The seed of one call: another for each scenario, agent and step."""
    identity = repr((seed, turn.game.scenario.scenario_id, turn.agent_id, turn.step))
    return int.from_bytes(blake2b(identity.encode(), digest_size=6).digest())


def scripted_answers(seed: int) -> Answer:
    """Scripted agents of mixed skill, one script a scenario, answering in the LLM's format."""

    async def answer(turn: Turn) -> Reply:
        who = f"{seed}:{turn.game.scenario.scenario_id}:{turn.agent_id}"
        name, agent = draw_agent(Random(who))
        decision = agent(turn.game, Random(call_seed(seed, turn)))
        return Reply(render_decision(decision), model=f"scripted-{name}")

    return answer


async def play_fleet(
    plan: FleetPlan,
    answer: Answer,
    recorder: TrajectoryRecorder,
    tracker: MarketOutcomesTracker,
    *,
    progress: Progress | None = None,
) -> FleetResult:
    """Play all rounds, record every trajectory, and write each window's outcomes when it is over:
    training may collect it while later ones are played.

    Raises:
        ServingError: the endpoint does not answer.
    """
    rounds = plan_rounds(plan)
    windows = [window_at(start, plan.window_minutes) for start, _ in rounds]
    pnl: list[float] = []
    calls = 0
    for number, (start, ticks) in enumerate(rounds):
        tables = deal(plan, start, ticks, number)
        for scenario, _ in tables:
            _observe(tracker, scenario, start)
        players = [
            _play(plan, number, scenario, agent, start, answer, recorder)
            for scenario, agents in tables
            for agent in agents
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(player) for player in players]
        except ExceptionGroup as failed:  # when the endpoint is down, all say the same
            first = failed.exceptions[0]
            raise first from first.__cause__
        pnl += [task.result() for task in tasks]
        calls += ticks * len(tasks)
        if progress is not None:
            progress(number + 1, len(rounds))
        if windows[number] not in windows[number + 1 :]:
            if plan.live:
                await sleep_until(windows[number].end)
            await tracker.write(windows[number].id)
    return FleetResult(
        windows=tuple(dict.fromkeys(window.id for window in windows)),
        scenarios=len(rounds) * len(_shards(plan)),
        trajectories=len(pnl),
        calls=calls,
        mean_pnl=sum(pnl) / len(pnl),
    )


def plan_rounds(plan: FleetPlan) -> list[tuple[datetime, int]]:
    """(start, ticks) of each round: at most ten ticks, never across the end of a window."""
    rounds = []
    moment, left = plan.start.astimezone(UTC), plan.duration_min
    while left > 0:
        until_end = window_at(moment, plan.window_minutes).end - moment
        ticks = min(left, MAX_TICKS, int(until_end / TICK))
        if ticks > 0:
            rounds.append((moment, ticks))
            moment += ticks * TICK
            left -= ticks
        else:
            moment += until_end
    return rounds


def fleet_start(
    now: datetime, duration_min: int, minutes: int, taken: Collection[str] = ()
) -> datetime:
    """Where a fast fleet plays: in the newest windows in a row that are over, ``duration_min`` of
    them, and none of which is ``taken``: what is played into a trained window is never trained."""
    window = window_at(now, minutes)
    free = 0
    while free * minutes < duration_min:
        window = window.previous()
        free = 0 if window.id in taken else free + 1
    return window.start


def _shards(plan: FleetPlan) -> list[range]:
    """Agents dealt into tables as evenly as possible."""
    tables = max(1, round(plan.agents / plan.agents_per_scenario))
    bounds = [plan.agents * table // tables for table in range(tables + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def deal(
    plan: FleetPlan, start: datetime, ticks: int, number: int
) -> list[tuple[Scenario, list[str]]]:
    """The scenarios of a round with the agents that play each."""
    window = window_at(start, plan.window_minutes)
    tables = []
    for shard, members in enumerate(_shards(plan)):
        name = f"{window.id}-s{plan.seed}r{number}t{shard}"
        scenario = make_scenario(f"fleet:{name}", Rules(ticks=ticks), name=name)
        tables.append((scenario, [f"agent-{index}" for index in members]))
    return tables


async def _play(
    plan: FleetPlan,
    number: int,
    scenario: Scenario,
    agent_id: str,
    start: datetime,
    answer: Answer,
    recorder: TrajectoryRecorder,
) -> float:
    """One trajectory. It is recorded once its questions are resolved; returns the P&L."""
    game = Game(scenario)
    trajectory_id = f"{plan.fleet_id}-r{number}-{agent_id}"
    recorder.start(agent_id, scenario.scenario_id, trajectory_id=trajectory_id, at=start)
    turns = []
    while not game.over:
        moment = start + game.tick * TICK
        if plan.live:
            await sleep_until(moment)
        messages = render_observation(game, agent_id)
        state = _environment_state(game)
        reply = await answer(Turn(agent_id, trajectory_id, game.tick, messages, game))
        decision = parse_decision(reply.text)
        before = game.pnl
        outcome = game.act(decision)
        turns.append(_Played(moment, messages, state, reply, decision, outcome, game.pnl - before))
    pnl = game.settle()
    for turn in turns:
        _record(recorder, trajectory_id, turn, game)
    await recorder.finish(
        trajectory_id,
        final_balance=game.balance,
        final_pnl=pnl,
        status="completed",
        game_knowledge=_ground_truth(scenario),
        at=start + scenario.rules.ticks * TICK,
    )
    return pnl


@dataclass(frozen=True, slots=True)
class _Played:
    moment: datetime
    messages: list[dict[str, str]]
    state: dict[str, object]
    reply: Reply
    decision: Decision
    outcome: Outcome
    pnl_change: float


def _record(recorder: TrajectoryRecorder, trajectory_id: str, turn: _Played, game: Game) -> None:
    outcome, reply = turn.outcome, turn.reply
    system, user = (message["content"] for message in turn.messages)
    call = LlmCall(
        model=reply.model,
        model_version=reply.model_version,
        system_prompt=system,
        user_prompt=user,
        response=reply.text,
        temperature=TEMPERATURE,
        max_tokens=MAX_REPLY_TOKENS,
        latency_ms=reply.latency_ms,
        purpose="action",
        action_type=outcome.action_type,
    )
    recorder.step(
        trajectory_id,
        environment_state=turn.state,
        llm_calls=[call],
        action=_action(outcome, game),
        reward=turn.pnl_change / 100,
        at=turn.moment,
    )


def _action(outcome: Outcome, game: Game) -> Action:
    if outcome.market_id is None or outcome.side is None:
        return Action(
            action_type=outcome.action_type,
            success=outcome.success,
            parameters={},
            error=outcome.error,
        )
    question = game.scenario.question(outcome.market_id)
    result: dict[str, object] = {"shares": outcome.shares, "dollars": outcome.dollars}
    if outcome.realised_pnl is not None:
        result["pnl"] = outcome.realised_pnl
    return Action(
        action_type=outcome.action_type,
        success=outcome.success,
        parameters={"marketId": outcome.market_id, "side": outcome.side.value},
        result=result,
        correctness={
            "predictionCorrect": game.won(outcome),
            "predictedOutcome": outcome.side.value,
            "actualOutcome": question.outcome.value if question else None,
        },
    )


def _environment_state(game: Game) -> dict[str, object]:
    return {
        "agentBalance": game.balance,
        "agentPnL": game.pnl,
        "openPositions": len(game.holdings),
        "activeMarkets": len(game.pools),
    }


def _ground_truth(scenario: Scenario) -> dict[str, dict[str, object]]:
    return {
        "trueProbabilities": {
            question.market_id: float(question.outcome is Side.YES)
            for question in scenario.questions
        },
        "actualOutcomes": {q.market_id: q.outcome.value for q in scenario.questions},
    }


def _observe(tracker: MarketOutcomesTracker, scenario: Scenario, start: datetime) -> None:
    """The scenario's public history: prices as background orders move them, and resolutions."""
    pools = {question.market_id: Pool() for question in scenario.questions}
    ids = {market: f"{scenario.scenario_id}:{market}" for market in pools}
    for tick, order in enumerate(scenario.noise):
        pools[order.market_id], _ = pools[order.market_id].buy(order.side, order.dollars)
        for question in scenario.questions:
            yes = pools[question.market_id].probability
            moment = start + tick * TICK
            tracker.probability(ids[question.market_id], question.text, yes, at=moment)
    for question in scenario.questions:
        end = start + scenario.rules.ticks * TICK - timedelta(seconds=1)
        tracker.resolve(ids[question.market_id], question.outcome.value, at=end)
