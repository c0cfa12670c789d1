"""Chats of scripted agents of mixed skill, the training data of the embedded base model.

The mixture writes valid replies and has some skill, so that rewards of its samples differ: in the
small game four agents in ten follow the news; the others trade at random, with the trend, against
the news, or hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from babylon.game.market.game import Game
from babylon.game.market.orders import Decision, Hold, Order, OrderKind, render_decision
from babylon.game.market.prompts import NAMES, name_of_agent, render_observation
from babylon.game.market.scenario import STARTER, Rules, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS, ScriptedAgent

MIXTURE = {"news": 0.4, "random": 0.3, "momentum": 0.1, "contrarian": 0.1, "hold": 0.1}
TABLES = 64  # games that ``varied_choices`` plays at once
ROUND = 25  # dollars
HOUR_MIXTURE = {
    "news": 0.3,
    "counter": 0.2,
    "mover": 0.15,
    "random": 0.15,
    "maker": 0.05,
    "contrarian": 0.05,
    "hold": 0.1,
}


Chat = list[dict[str, str]]


def scripted_chats(seed: int | str, rules: Rules | None = None) -> Iterator[Chat]:
    """Yield chats without end, one per decision: system, user and assistant message."""
    random = Random(f"transcripts:{seed}")
    for number in range(1_000_000_000):
        game = Game(make_scenario(f"transcript:{seed}:{number}", rules))
        _, agent = draw_agent(random, game.scenario.rules)
        name = name_of_agent(random.randrange(NAMES))
        while not game.over:
            observation = render_observation(game, name)
            decision = agent(game, random)
            yield [*observation, {"role": "assistant", "content": render_decision(decision)}]
            game.act(decision)


@dataclass(frozen=True, slots=True)
class Choices:
    """A prompt of system and user message, and replies of several agents to it."""

    prompt: Chat
    replies: tuple[str, ...]


def varied_choices(
    seed: int, worlds: Sequence[Rules], replies: int, mixture: Mapping[str, float] | None = None
) -> Iterator[Choices]:
    """Yield prompts without end, each with ``replies`` replies that agents of the mixture give.

    ``TABLES`` games are played at once, in turn, so that neighbours are of other games. They play
    ``worlds`` in turn, and begin at different ticks. ``mixture``: that of the rules by default.
    """
    tables = []
    for number in range(TABLES):
        rules = worlds[number % len(worlds)]
        table = _choices(f"{seed}:{number}", rules, replies, mixture)
        tables.append(islice(table, rules.ticks * number // TABLES, None))
    for table in cycle(tables):
        yield next(table)


def _choices(
    seed: str, rules: Rules, replies: int, mixture: Mapping[str, float] | None
) -> Iterator[Choices]:
    random = Random(f"transcripts:{seed}")
    for number in range(1_000_000_000):
        game = Game(make_scenario(f"transcript:{seed}:{number}", rules))
        _, agent = draw_agent(random, rules, mixture)
        name = name_of_agent(random.randrange(NAMES))
        while not game.over:
            drawn = [draw_agent(random, rules, mixture)[1] for _ in range(replies)]
            others = [_plain(other(game, random)) for other in drawn]
            yield Choices(
                render_observation(game, name), tuple(render_decision(other) for other in others)
            )
            game.act(agent(game, random))


def _plain(decision: Decision) -> Decision:
    """Return the decision with a round amount, and hold instead of writing on the feed.

    A tiny model that must guess among a thousand amounts also guesses tokens that are none. Selling
    more than is held sells all.
    """
    if not isinstance(decision, Order):
        return Hold()
    if decision.kind in (OrderKind.SELL, OrderKind.CLOSE):
        return replace(decision, amount=1000.0 if decision.kind is OrderKind.SELL else 0.0)
    amount = decision.amount // ROUND * ROUND
    return replace(decision, amount=amount) if amount else Hold()


def draw_agent(
    random: Random, rules: Rules = STARTER, mixture: Mapping[str, float] | None = None
) -> tuple[str, ScriptedAgent]:
    """Draw a scripted agent → (name, agent).

    ``mixture``: shares by name. By default that of the rules: with perps, it includes a market
    maker.
    """
    mixture = mixture or (HOUR_MIXTURE if rules.perps else MIXTURE)
    name = random.choices([*mixture], [*mixture.values()])[0]
    return name, SCRIPTED_AGENTS[name]
