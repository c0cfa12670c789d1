"""Rows that no market of this version could have produced are skipped, and stop nothing."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from babylon.core.llm_calls import LlmCall
from babylon.evaluation.rebuild.recorded import RecordedRow, RecordedStep
from babylon.evaluation.rebuild.recorded_windows import rebuild_rows
from babylon.game.fleet.fleet_records import environment_state, ground_truth
from babylon.game.market.game import Game as OneSeat
from babylon.game.market.game import make_market
from babylon.game.market.observed import observed
from babylon.game.market.orders import Hold, parse_decision, render_decision
from babylon.game.market.scenario import STARTER, Rules, Scenario, make_scenario
from babylon.game.market.scripted import random_trader

NAMES = ("a", "b")
Game = dict[str, Any]


def row(name: str, scenario: Scenario, steps: list[dict[str, Any]], pnl_usd: float) -> RecordedRow:
    return RecordedRow(
        trajectory_id=name,
        agent_id=name,
        window_id="w",
        scenario_id=scenario.scenario_id,
        pnl_usd=pnl_usd,
        steps=msgspec.convert(steps, tuple[RecordedStep, ...]),
        knowledge=ground_truth(scenario),
        outcomes=(),
    )


def shared_rows(change: Callable[[Game], None], copied_as: str | None = None) -> list[RecordedRow]:
    """Rows of two agents in one market. ``change`` gets the constants that each first step has."""
    scenario, random = make_scenario(0, STARTER), Random(0)
    market = make_market(scenario)
    seats = {name: market.join(name) for name in NAMES}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    while not market.over:
        replies = {n: render_decision(random_trader(seat, random)) for n, seat in seats.items()}
        for name, seat in seats.items():
            call = LlmCall(
                system_prompt="",
                user_prompt="",
                response=replies[name],
                temperature=1.0,
                purpose="action",
            )
            state = environment_state(seat) | observed(seat)
            one = {"timestamp": 6e4 * market.tick, "environmentState": state}
            steps[name].append(one | {"llmCalls": [msgspec.to_builtins(call)]})
        market.step({name: parse_decision(reply) for name, reply in replies.items()})
    market.settle()
    for name in NAMES:
        change(steps[name][0]["environmentState"]["market"]["game"])
    written = [(name, name) for name in NAMES] + ([(copied_as, "a")] if copied_as else [])
    return [row(name, scenario, steps[own], seats[own].pnl) for name, own in written]


def test_a_shared_market_is_rebuilt() -> None:
    found = rebuild_rows(shared_rows(lambda game: None))
    assert [len(one.plays) for one in found.scenarios] == [2] and not found.skipped


@pytest.mark.parametrize(
    ("change", "copied_as", "reason"),
    [
        (
            lambda game: game["rules"].update(opponents=["zorro"]),
            None,
            "opponents zorro are unknown",
        ),
        (
            lambda game: game["questions"][1].update(text="Will it? " * 5),
            None,
            "a text of its market has 45 bytes, those of the game have at most 40",
        ),
        (lambda game: game.update(questions=game["questions"] * 9), None, "[27, 0] questions and"),
        (
            lambda game: (
                game["rules"].update(markets=999),
                game.update(questions=game["questions"] * 333),
            ),
            None,
            "at most 8 of each are possible",
        ),
        (lambda game: game["rules"].update(start_balance=1e300), None, "has the number 1e+300"),
        (lambda game: game.update(players=["a", "b", "b"]), None, "'b' already has an account"),
        (lambda game: None, "c", "c played, but did not join its market"),
    ],
)
def test_a_market_that_cannot_be_made_again_is_skipped(
    change: Callable[[Game], None], copied_as: str | None, reason: str
) -> None:
    found = rebuild_rows(shared_rows(change, copied_as))
    assert not found.scenarios and reason in found.skipped[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tick: tick["prices"][0].update(price=0), "is below one cent"),
        (lambda tick: tick["prices"][0].update(price=1e300), "its market has the number 1e+300"),
        (lambda tick: tick["news"].update(text="x " * 40_000), "a text of its market has 80000 by"),
        (lambda tick: tick["news"].update(marketId="m9"), "a headline is about no market of the"),
        (lambda tick: tick["pools"][0].update(yes=0, no=0), "the reserves of m1 are 0/0"),
        (lambda tick: tick["pools"][0].update(yes=0, no=-5), "the reserves of m1 are 0/-5"),
        (lambda tick: tick["pools"][0].update(yes=1e308, no=1e308), "of scenario"),
    ],
)
def test_a_tick_that_no_market_can_play_is_skipped(
    change: Callable[[Game], None], reason: str
) -> None:
    scenario = make_scenario(0, Rules(markets=1, perps=1, ticks=2))
    game, steps = OneSeat(scenario, "a"), list[dict[str, Any]]()
    while not game.over:
        state = environment_state(game) | observed(game)
        call = LlmCall(
            system_prompt="",
            user_prompt="",
            response=render_decision(Hold()),
            temperature=1.0,
            purpose="action",
        )
        one = {"timestamp": 6e4 * game.tick, "environmentState": state}
        steps.append(one | {"llmCalls": [msgspec.to_builtins(call)]})
        game.act(Hold())
    sound = row("sound", scenario, deepcopy(steps), pnl_usd := game.settle())
    change(steps[1]["environmentState"]["market"])
    found = rebuild_rows([row("a", scenario, steps, pnl_usd), replace(sound, agent_id="a")])
    assert [len(one.plays) for one in found.scenarios] == [1] and reason in found.skipped[0].reason
