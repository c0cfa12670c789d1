"""Play many scenarios in lock-step, so that a batched policy answers all of them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from babylon.market.game import Game
from babylon.market.orders import Decision, Hold, parse_decision
from babylon.market.prompts import render_observation
from babylon.market.scenario import Scenario
from babylon.market.scripted import ScriptedAgent

Chat = list[dict[str, str]]
ReplyPolicy = Callable[[Sequence[Chat]], Sequence[str]]
Decide = Callable[[Sequence[Game]], Sequence[Decision]]


@dataclass(frozen=True, slots=True)
class ArenaResult:
    """One number a scenario, in the order of the scenarios; P&L in simulator dollars."""

    pnl: tuple[float, ...]
    win_rate: tuple[float, ...]
    malformed: tuple[float, ...]  # share of a scenario's decisions

    @property
    def mean_pnl(self) -> float:
        return fmean(self.pnl)


def replies(policy: ReplyPolicy, agent_name: str = "arena") -> Decide:
    """Decide by asking a policy that reads chats and writes replies."""

    def decide(games: Sequence[Game]) -> Sequence[Decision]:
        chats = [render_observation(game, agent_name) for game in games]
        return [parse_decision(reply) for reply in policy(chats)]

    return decide


def scripted(agent: ScriptedAgent, seed: int = 0) -> Decide:
    """Decide by a scripted agent."""

    def decide(games: Sequence[Game]) -> Sequence[Decision]:
        return [
            agent(game, Random(f"{seed}:{game.scenario.scenario_id}:{game.tick}")) for game in games
        ]

    return decide


def play(decide: Decide, scenarios: Sequence[Scenario]) -> ArenaResult:
    """Play each scenario once, from the first tick to settlement."""
    games = [Game(scenario) for scenario in scenarios]
    malformed = [0] * len(games)
    while live := [index for index, game in enumerate(games) if not game.over]:
        decisions = decide([games[index] for index in live])
        for index, decision in zip(live, decisions, strict=True):
            if isinstance(decision, Hold):
                malformed[index] += decision.error is not None
            games[index].act(decision)
    return ArenaResult(
        pnl=tuple(game.settle() for game in games),
        win_rate=tuple(_win_rate(game) for game in games),
        malformed=tuple(m / g.scenario.rules.ticks for m, g in zip(malformed, games, strict=True)),
    )


def _win_rate(game: Game) -> float:
    decided = [won for outcome in game.outcomes if (won := game.won(outcome)) is not None]
    return fmean(decided) if decided else 0.0
