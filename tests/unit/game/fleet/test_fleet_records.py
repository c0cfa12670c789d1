from dataclasses import replace

import pytest

from babylon.core.game_rows import scenario_ticker
from babylon.game.fleet.fleet_records import (
    action_of,
    environment_state,
    ground_truth,
    sentiment,
)
from babylon.game.market.amm import Side
from babylon.game.market.game import Game
from babylon.game.market.orders import Comment, Hold, Order, OrderKind, Post
from babylon.game.market.scenario import HOUR, News, Question, make_scenario
from babylon.recorder import Action
from tests.worlds import perp, quiet_world

BAD, GOOD = (
    News("OPNAI", "orders are cancelled", Side.NO),
    News("OPNAI", "orders pour in", Side.YES),
)


def game(**changes: object) -> Game:
    scenario = quiet_world(fee=0.001, perps=[perp(200.0, 210.0, 210.0, 210.0, 210.0)], feed=True)
    return Game(replace(scenario, **changes))  # type: ignore[arg-type]


def test_a_perp_trade_has_the_games_own_keys() -> None:
    played = game(news=(BAD, None, GOOD, None))
    opened = played.act(Order("OPNAI", OrderKind.OPEN_LONG, 500, 5))
    closed = played.act(Order("OPNAI", OrderKind.CLOSE, 0))
    played.settle()
    parameters = {"ticker": "OPNAI", "side": "long", "size": 500, "leverage": 5}
    correctness = {
        "perpCorrect": True,
        "sentimentAtTrade": -1,
        "expectedDirection": "up",
        "priceChange": 100 * (210 / 200 - 1),
    }
    assert action_of(opened, played, 0) == Action(
        action_type="OPEN_PERP_POSITION",
        success=True,
        parameters=parameters,
        result={"price": 200.0, "fee": 0.5},
        correctness=correctness | {"payoff": pytest.approx(25 - 0.5 - 0.5)},
    )
    assert action_of(closed, played, 1) == Action(
        action_type="CLOSE_PERP_POSITION",
        success=True,
        parameters=parameters,
        result={"price": 210.0, "fee": 0.5, "pnl": closed.realised_pnl},
        correctness=correctness | {"payoff": 0.0},  # the price stayed until the end
    )


def test_a_liquidated_position_was_wrong_though_the_price_came_back() -> None:
    played = game(perps=(perp(200.0, 150.0, 300.0, 300.0, 300.0),))
    opened = played.act(Order("OPNAI", OrderKind.OPEN_LONG, 500, 5))
    played.settle()
    correctness = action_of(opened, played, 0).correctness
    assert correctness is not None and correctness["perpCorrect"] is False
    assert correctness["priceChange"] == 100 * (200 * (1 - 0.9 / 5) / 200 - 1)


def test_what_is_written_on_the_feed_is_recorded() -> None:
    played = game()
    post, comment = played.act(Post("up  only")), played.act(Comment("p1", "why?"))
    assert action_of(post, played, 0) == Action(
        action_type="CREATE_POST",
        success=True,
        parameters={"content": "up only"},
        result={"postId": "p1"},
    )
    assert action_of(comment, played, 1).parameters == {"content": "why?"}
    assert action_of(comment, played, 1).action_type == "COMMENT"


def test_a_malformed_reply_is_a_failed_decision_with_its_error() -> None:
    played = game()
    action = action_of(played.act(Hold("malformed reply: x")), played, 0)
    assert (action.action_type, action.success) == ("TRADING_DECISION", False)
    assert action.error == "malformed reply: x" and action.correctness is None


def test_the_sentiment_of_a_trade_is_the_newest_headlines() -> None:
    scenario = game(news=(BAD, None, GOOD, None)).scenario
    assert [sentiment(scenario, "OPNAI", tick) for tick in range(4)] == [-1, -1, 1, 1]
    assert sentiment(scenario, "NVDT", 3) == 0


def test_the_state_counts_positions_of_both_kinds_and_what_can_be_traded() -> None:
    played = game(questions=(Question("m1", "?", Side.YES, 2), Question("m2", "?", Side.NO)))
    assert environment_state(played) == {
        "agentBalance": 1000.0,
        "agentPnL": 0.0,
        "openPositions": 0,
        "activeMarkets": 3,
    }
    played.act(Order("OPNAI", OrderKind.OPEN_LONG, 500, 5))
    played.act(Order("m2", OrderKind.BUY_YES, 50))
    state = environment_state(played)
    assert (state["openPositions"], state["activeMarkets"]) == (2, 2)


def test_ground_truth_knows_outcomes_and_where_prices_end() -> None:
    scenario = make_scenario(1, HOUR)
    truth = ground_truth(scenario)
    assert truth["actualOutcomes"] == {q.market_id: q.outcome.value for q in scenario.questions}
    assert truth["futureOutcomes"] == {
        p.ticker: {"startPrice": p.prices[0], "endPrice": p.prices[-1]} for p in scenario.perps
    }
    assert "futureOutcomes" not in ground_truth(make_scenario(1))


def test_a_ticker_is_told_apart_by_its_scenario_and_fits_the_games_column() -> None:
    scenarios = [make_scenario(1, HOUR, name=f"2026-01-01T09:00-s1r0t{shard}") for shard in (0, 1)]
    names = {scenario_ticker(s.scenario_id, perp.ticker) for s in scenarios for perp in s.perps}
    assert len(names) == 10
    assert all(len(name) <= 20 for name in names)
