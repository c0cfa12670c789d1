"""The small game is frozen: the demo's model has learnt these worlds and prompts, to the byte.

Another digest means another embedded model, and a demo whose gain has to be measured again.
"""

import hashlib
import itertools
from random import Random

import pytest

from babylon.game.market.game import Game
from babylon.game.market.orders import render_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Rules, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.game.market.transcripts import scripted_chats


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def world(seed: int | str, rules: Rules | None = None) -> tuple[object, ...]:
    scenario = make_scenario(seed, rules)
    return (
        scenario.scenario_id,
        [(q.market_id, q.text, q.outcome.value) for q in scenario.questions],
        [(n.market_id, n.text, n.hints.value) for n in scenario.news if n],
        [(o.market_id, o.side.value, o.dollars) for o in scenario.noise if o],
    )


def playthrough(name: str, seed: int) -> list[object]:
    """All that is seen, said, filled and earned, every number with all its digits."""
    game, random = Game(make_scenario(seed)), Random(seed)
    seen: list[object] = []
    while not game.over:
        chat = render_observation(game, "agent-7")
        decision = SCRIPTED_AGENTS[name](game, random)
        before = game.pnl
        did = game.act(decision)
        numbers = (did.shares, did.dollars, game.pnl - before, game.balance)
        seen.append((chat, render_decision(decision), did.action_type, did.success, *numbers))
    return [*seen, (game.settle(), [game.won(outcome) for outcome in game.outcomes])]


def test_its_worlds_are_as_they_were() -> None:
    assert digest([world(seed) for seed in range(50)]) == "0d2d35a313c65aa9"
    longer = [world(f"x:{seed}", Rules(ticks=10)) for seed in range(20)]
    assert digest(longer) == "c4565ed529dc160f"


@pytest.mark.parametrize(
    ("name", "as_it_was"),
    [
        ("random", "5d8bdf6e449c576c"),
        ("news", "91c9386b2204e61c"),
        ("contrarian", "0bf2183daec6da7f"),
        ("momentum", "08658e9796454628"),
        ("hold", "b591a108b6e47dec"),
        ("oracle", "a15601755ba5637e"),
    ],
)
def test_its_play_is_as_it_was(name: str, as_it_was: str) -> None:
    assert digest([playthrough(name, seed) for seed in range(30)]) == as_it_was


def test_what_the_embedded_model_imitates_is_as_it_was() -> None:
    assert digest(list(itertools.islice(scripted_chats(0), 2000))) == "e923f63eaf7fd6c9"


def test_its_prompt_in_full() -> None:
    game, random = Game(make_scenario(3)), Random(0)
    for _ in range(3):
        game.act(SCRIPTED_AGENTS["news"](game, random))
    assert render_observation(game, "agent-7") == [
        {
            "role": "system",
            "content": "You trade prediction markets. A winning share pays $1. Answer with one JSON"
            ' object: {"action":"hold"} or {"action":"trade","trade":{"type":"prediction",'
            '"market":ID,"action":"buy_yes" or "buy_no" or "sell","amount":N}}',
        },
        {
            "role": "user",
            "content": "m1 Will Nvidiot sign the deal?\n"
            "m2 Will TeslAI ship?\n"
            "m3 Will Amazen get approval?\n"
            "News on m3: sources expect failure.\n"
            "YES prices: m1 0.37 m2 0.63 m3 0.54\n"
            "Positions: m2 YES 265 m1 NO 265 m3 NO 51\n"
            "agent-7, balance $675, P&L $-2.",
        },
    ]
