"""A fleet's steps and market outcomes in the format of the live game's rows."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from babylon.core.game_rows import scenario_market, scenario_ticker
from babylon.game.fleet.answers import TEMPERATURE, Reply, Turn
from babylon.game.fleet.fleet_plan import TICK
from babylon.game.market.account import Outcome, PerpFill
from babylon.game.market.amm import Side
from babylon.game.market.market import Market, Seat
from babylon.game.market.orders import MAX_REPLY_TOKENS
from babylon.game.market.perps import Direction
from babylon.game.market.scenario import Scenario
from babylon.recorder import Action, LlmCall, MarketOutcomesTracker, TrajectoryRecorder

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One step of one agent, recorded after the game when the ends of its trades are known."""

    turn: Turn
    moment: datetime
    state: Json
    reply: Reply
    outcome: Outcome
    pnl_change: float


def record_step(recorder: TrajectoryRecorder, played: PlayedStep) -> None:
    turn, reply = played.turn, played.reply
    system, user = (message["content"] for message in turn.messages)
    call = LlmCall(
        model=reply.model,
        model_version=reply.model_version,
        call_id=reply.call_id,
        system_prompt=system,
        user_prompt=user,
        response=reply.text,
        temperature=TEMPERATURE,
        max_tokens=MAX_REPLY_TOKENS,
        latency_ms=reply.latency_ms,
        purpose="action",
        action_type=played.outcome.action_type,
    )
    recorder.step(
        turn.trajectory_id,
        environment_state=played.state,
        llm_calls=[call],
        action=action_of(played.outcome, turn.game, turn.step),
        reward=played.pnl_change / 100,
        at=played.moment,
    )


def action_of(outcome: Outcome, seat: Seat, tick: int) -> Action:
    """Return an outcome as the row's action. The market of ``seat`` must be settled."""
    parameters: Json = {}
    result: Json | None = None
    correctness: Json | None = None
    if outcome.market_id is not None and outcome.side is not None:
        parameters = {"marketId": outcome.market_id, "side": outcome.side.value}
        result = {"shares": outcome.shares, "dollars": outcome.dollars}
        question = seat.scenario.question(outcome.market_id)
        correctness = {
            "predictionCorrect": seat.won(outcome),
            "predictedOutcome": outcome.side.value,
            "actualOutcome": question.outcome.value if question else None,
        }
    elif (fill := outcome.perp) is not None:
        parameters = {"ticker": fill.ticker, "side": fill.direction.value, "size": fill.size}
        parameters["leverage"] = fill.leverage
        result = {"price": fill.price, "fee": fill.fee}
        correctness = _perp_correctness(outcome, fill, seat, tick)
    elif outcome.post_id is not None:
        parameters, result = {"content": outcome.content}, {"postId": outcome.post_id}
    if result is not None and outcome.realised_pnl is not None:
        result["pnl"] = outcome.realised_pnl
    return Action(
        action_type=outcome.action_type,
        success=outcome.success,
        parameters=parameters,
        result=result,
        error=outcome.error,
        correctness=correctness,
    )


def _perp_correctness(outcome: Outcome, fill: PerpFill, seat: Seat, tick: int) -> Json:
    end = fill.exit.price
    return {
        "perpCorrect": seat.won(outcome),
        "sentimentAtTrade": sentiment(seat.scenario, fill.ticker, tick),
        "expectedDirection": "up" if fill.direction is Direction.LONG else "down",
        "priceChange": None if end is None else 100.0 * (end / fill.entry - 1.0),
        "payoff": fill.payoff,
    }


def sentiment(scenario: Scenario, ticker: str, tick: int) -> int:
    """Return the newest headline's hint about a ticker: 1 good, -1 bad, 0 no headline yet."""
    about = [news for news in scenario.news[: tick + 1] if news and news.market_id == ticker]
    return 0 if not about else 1 if about[-1].hints is Side.YES else -1


def environment_state(seat: Seat) -> Json:
    """Return an agent's own state before it acts."""
    return {
        "agentBalance": seat.balance,
        "agentPnL": seat.pnl,
        "openPositions": len(seat.holdings) + len(seat.positions),
        "activeMarkets": len(seat.pools) + len(seat.prices),
    }


def ground_truth(scenario: Scenario) -> dict[str, Json]:
    """Return a scenario's outcomes and final prices, which only the judge reads."""
    truth: dict[str, Json] = {
        "trueProbabilities": {
            question.market_id: float(question.outcome is Side.YES)
            for question in scenario.questions
        },
        "actualOutcomes": {q.market_id: q.outcome.value for q in scenario.questions},
    }
    if scenario.perps:
        truth["futureOutcomes"] = {
            perp.ticker: {"startPrice": perp.prices[0], "endPrice": perp.prices[-1]}
            for perp in scenario.perps
        }
    return truth


def observe(tracker: MarketOutcomesTracker, market: Market, at: datetime) -> None:
    """Track a market's public probabilities and prices at one tick."""
    scenario = market.scenario
    for question in scenario.questions:
        if pool := market.predictions.pools.get(question.market_id):
            name = scenario_market(scenario.scenario_id, question.market_id)
            tracker.probability(name, question.text, pool.probability, at=at)
    for ticker, price in market.futures.prices.items():
        tracker.price(scenario_ticker(scenario.scenario_id, ticker), price, at=at)


def observe_end(tracker: MarketOutcomesTracker, scenario: Scenario, start: datetime) -> None:
    """Track the resolutions of the questions and the last prices."""
    ticks = scenario.rules.ticks
    just_before = start - timedelta(seconds=1)
    for question in scenario.questions:
        end = min(question.end(scenario.rules), ticks)
        name = scenario_market(scenario.scenario_id, question.market_id)
        tracker.resolve(name, question.outcome.value, at=just_before + end * TICK)
    for perp in scenario.perps:
        ticker = scenario_ticker(scenario.scenario_id, perp.ticker)
        tracker.price(ticker, perp.prices[ticks], at=just_before + ticks * TICK)
