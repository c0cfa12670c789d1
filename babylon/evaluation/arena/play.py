"""Playing many scenarios in lock-step, so that a batched policy answers all of them at once.

Players share two kinds of random numbers: the worlds, and the uniforms with which each reply of a
world and tick is drawn, independent of earlier ticks. Equal policies then act equally, and a paired
difference measures only where two policies really differ.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from babylon.evaluation.arena.confidence import Interval, mean_interval
from babylon.game.market.game import Game
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision, Hold, parse_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS, ScriptedAgent

Chat = list[dict[str, str]]
Floats = NDArray[np.float64]
ReplyPolicy = Callable[[Sequence[Chat], Sequence[int]], Sequence[str]]
"""(chats, one seed per chat) → replies."""
Decide = Callable[[Sequence[Seat]], Sequence[Decision]]
YARDSTICKS = ("random", "news", "oracle")
NAME = "arena"  # every player's name in its prompts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plays:
    """A player's results in N scenarios, in order; money in simulator dollars.

    ``equity`` ``[N, ticks + 1]``: profit so far, before each tick and after settlement.
    ``drawdown`` ``[N]``: largest fall of the equity below an earlier value.
    ``decisions``: number of times that each decision was taken, over all scenarios.
    """

    equity: Floats
    win_rate: Floats  # [N] share of decided trades that won; 0 without any
    malformed: Floats  # [N] share of a scenario's replies
    decisions: Counter[Decision]
    start_balance: float

    @property
    def pnl(self) -> Floats:
        return self.equity[:, -1]

    @property
    def mean_pnl(self) -> float:
        return float(self.pnl.mean())

    @property
    def drawdown(self) -> Floats:
        highest: Floats = np.maximum.accumulate(self.equity, axis=1)
        falls: Floats = (highest - self.equity).max(axis=1)
        return falls

    @property
    def commonest(self) -> tuple[Decision, float]:
        """The most frequent decision, and its share of all."""
        ((decision, count),) = self.decisions.most_common(1)
        return decision, count / self.decisions.total()


def joined(parts: Iterable[Plays]) -> Plays:
    """Concatenate the batches of one player."""
    batches = list(parts)
    return Plays(
        equity=np.concatenate([part.equity for part in batches]),
        win_rate=np.concatenate([part.win_rate for part in batches]),
        malformed=np.concatenate([part.malformed for part in batches]),
        decisions=sum((part.decisions for part in batches), Counter()),
        start_balance=batches[0].start_balance,
    )


def replies(policy: ReplyPolicy, seed: int = 0) -> Decide:
    """Return decisions by a policy that answers chats."""

    def decide(seats: Sequence[Seat]) -> Sequence[Decision]:
        chats = [render_observation(seat, seat.account.name) for seat in seats]
        seeds = [
            int.from_bytes(blake2b(_draw(seed, s).encode(), digest_size=7).digest()) for s in seats
        ]
        return [parse_decision(reply) for reply in policy(chats, seeds)]

    return decide


def scripted(agent: ScriptedAgent, seed: int = 0) -> Decide:
    """Return decisions by a scripted agent."""

    def decide(seats: Sequence[Seat]) -> Sequence[Decision]:
        return [agent(seat, Random(_draw(seed, seat))) for seat in seats]

    return decide


def play(decide: Decide, scenarios: Sequence[Scenario]) -> Plays:
    """Play each scenario once, from the first tick to the settlement. All have equal length."""
    games = [Game(scenario, NAME) for scenario in scenarios]
    malformed = np.zeros(len(games))
    decisions: Counter[Decision] = Counter()
    equity: list[list[float]] = [[] for _ in games]
    while live := [index for index, game in enumerate(games) if not game.over]:
        for index, decision in zip(live, decide([games[index] for index in live]), strict=True):
            game = games[index]
            equity[index].append(game.pnl)
            malformed[index] += is_malformed(decision)
            decisions[decision] += 1
            game.act(decision)
    for curve, game in zip(equity, games, strict=True):
        curve.append(game.settle())
    return Plays(
        equity=np.array(equity),
        win_rate=np.array([_win_rate(game) for game in games]),
        malformed=malformed / [game.scenario.rules.ticks for game in games],
        decisions=decisions,
        start_balance=scenarios[0].rules.start_balance,
    )


def is_malformed(decision: Decision) -> bool:
    """Return whether the reply could not be parsed as a decision."""
    return isinstance(decision, Hold) and decision.error is not None


def _draw(seed: int, seat: Seat) -> str:
    return f"{seed}:{seat.scenario.scenario_id}:{seat.tick}"


def _win_rate(game: Game) -> float:
    decided = [won for outcome in game.outcomes if (won := game.won(outcome)) is not None]
    return fmean(decided) if decided else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerResult:
    """A player's P&L by scenario in simulator dollars, and the means of its other figures.

    ``equity`` ``[ticks + 1]``: mean profit so far, before each tick and after settlement.
    """

    pnl: tuple[float, ...]
    equity: tuple[float, ...]
    win_rate: float
    malformed: float
    drawdown: float

    @property
    def mean_pnl(self) -> Interval:
        """Mean P&L with the 95 % interval of a single look."""
        return mean_interval(self.pnl)


def result_of(plays: Plays) -> PlayerResult:
    return PlayerResult(
        pnl=tuple(plays.pnl.round(4).tolist()),
        equity=tuple(plays.equity.mean(axis=0).round(4).tolist()),
        win_rate=float(plays.win_rate.mean()),
        malformed=float(plays.malformed.mean()),
        drawdown=float(plays.drawdown.mean()),
    )


def yardsticks(worlds: Sequence[Scenario]) -> dict[str, PlayerResult]:
    """Return the results of scripted agents on the same worlds: random, news and oracle."""
    return {name: result_of(play(scripted(SCRIPTED_AGENTS[name]), worlds)) for name in YARDSTICKS}
