"""Play many scenarios in lock-step, so that a batched policy answers all of them at once.

Common random numbers, twice: whoever plays meets the same worlds, and draws each reply with the
uniforms of that world and tick, whatever happened before. Two policies that think alike then act
alike, and what is left of a paired difference is what really differs between them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from babylon.game.market.game import Game
from babylon.game.market.orders import Decision, Hold, parse_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import ScriptedAgent
from babylon.game.market.market import Seat

Chat = list[dict[str, str]]
Floats = NDArray[np.float64]
ReplyPolicy = Callable[[Sequence[Chat], Sequence[int]], Sequence[str]]
"""(chats, a seed for each) → replies."""
Decide = Callable[[Sequence[Seat]], Sequence[Decision]]
NAME = "arena"  # of every player, in its prompts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plays:
    """How one player did in N scenarios, in their order; simulator dollars.

    ``equity`` ``[N, ticks + 1]``: profit so far, before each tick and after settlement.
    ``drawdown`` ``[N]``: its largest fall below an earlier height, at least 0.
    ``decisions``: how often each was taken, over all scenarios.
    """

    equity: Floats
    win_rate: Floats  # [N] of decided trades, 0 without any
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
        """The decision taken most often, and its share of all."""
        ((decision, count),) = self.decisions.most_common(1)
        return decision, count / self.decisions.total()


def joined(parts: Iterable[Plays]) -> Plays:
    """Several batches of one player as one."""
    batches = list(parts)
    return Plays(
        equity=np.concatenate([part.equity for part in batches]),
        win_rate=np.concatenate([part.win_rate for part in batches]),
        malformed=np.concatenate([part.malformed for part in batches]),
        decisions=sum((part.decisions for part in batches), Counter()),
        start_balance=batches[0].start_balance,
    )


def replies(policy: ReplyPolicy, seed: int = 0) -> Decide:
    """Decide by asking a policy that reads chats and writes replies."""

    def decide(seats: Sequence[Seat]) -> Sequence[Decision]:
        chats = [render_observation(seat, seat.account.name) for seat in seats]
        seeds = [
            int.from_bytes(blake2b(_draw(seed, s).encode(), digest_size=7).digest()) for s in seats
        ]
        return [parse_decision(reply) for reply in policy(chats, seeds)]

    return decide


def scripted(agent: ScriptedAgent, seed: int = 0) -> Decide:
    """Decide by a scripted agent."""

    def decide(seats: Sequence[Seat]) -> Sequence[Decision]:
        return [agent(seat, Random(_draw(seed, seat))) for seat in seats]

    return decide


def play(decide: Decide, scenarios: Sequence[Scenario]) -> Plays:
    """Play each scenario once, from the first tick to settlement. All last equally long."""
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
    """Did the reply mean nothing that can be decided?"""
    return isinstance(decision, Hold) and decision.error is not None


def _draw(seed: int, seat: Seat) -> str:
    return f"{seed}:{seat.scenario.scenario_id}:{seat.tick}"


def _win_rate(game: Game) -> float:
    decided = [won for outcome in game.outcomes if (won := game.won(outcome)) is not None]
    return fmean(decided) if decided else 0.0
