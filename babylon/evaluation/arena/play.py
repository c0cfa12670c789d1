"""Playing many scenarios in lock-step, so that a batched policy answers all of them at once.

Players share two kinds of random numbers: the worlds, and the uniforms with which each reply of a
world and tick is drawn, independent of earlier ticks. Equal policies then act equally, and a paired
difference measures only where two policies really differ.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from babylon.evaluation.arena.confidence import Interval, mean_interval
from babylon.game.market.game import make_market
from babylon.game.market.market import Market, Seat
from babylon.game.market.orders import Decision, Hold, parse_decision
from babylon.game.market.prompts import names_of, render_observation
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import RULES, SCRIPTED_AGENTS, ScriptedAgent

Chat = list[dict[str, str]]
Floats = NDArray[np.float64]
ReplyPolicy = Callable[[Sequence[Chat], Sequence[int]], Sequence[str]]
"""(chats, one seed per chat) → replies."""
Decide = Callable[[Sequence[Seat]], Sequence[Decision]]
YARDSTICKS = ("random", "news", "oracle")
WORST = 0.05  # share of the worlds in ``tail``


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
    def tail(self) -> float:
        """Mean P&L in the worst 5 % of the worlds (conditional value at risk)."""
        worst = max(1, round(WORST * len(self.pnl)))
        return float(np.partition(self.pnl, worst - 1)[:worst].mean())

    @property
    def drawdown(self) -> Floats:
        highest: Floats = np.maximum.accumulate(self.equity, axis=1)
        falls: Floats = (highest - self.equity).max(axis=1)
        return falls

    def chosen(self, worlds: NDArray[np.bool_]) -> "Plays":
        """Return the results in some worlds ``[N]``; ``decisions`` stay those of all."""
        return replace(
            self,
            equity=self.equity[worlds],
            win_rate=self.win_rate[worlds],
            malformed=self.malformed[worlds],
        )

    @property
    def commonest(self) -> tuple[Decision, float]:
        """The most frequent decision, and its share of all."""
        ((decision, count),) = self.decisions.most_common(1)
        return decision, count / self.decisions.total()


def joined(parts: Iterable[Plays]) -> Plays:
    """Concatenate the batches of one player. Shorter games keep their last equity."""
    batches = list(parts)
    ticks = max(part.equity.shape[1] for part in batches)
    return Plays(
        equity=np.concatenate([_padded(part.equity, ticks) for part in batches]),
        win_rate=np.concatenate([part.win_rate for part in batches]),
        malformed=np.concatenate([part.malformed for part in batches]),
        decisions=sum((part.decisions for part in batches), Counter()),
        start_balance=batches[0].start_balance,
    )


def _padded(equity: Floats, ticks: int) -> Floats:
    return np.pad(equity, ((0, 0), (0, ticks - equity.shape[1])), "edge")


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


@dataclass(frozen=True, slots=True)
class Table:
    """One market of the arena: ``copies`` of the player, then the others."""

    market: Market
    seats: list[Seat]
    copies: int

    @property
    def own(self) -> list[Seat]:
        return self.seats[: self.copies]

    @property
    def pnl(self) -> float:
        return fmean(seat.pnl for seat in self.own)


def play(
    decide: Decide,
    scenarios: Sequence[Scenario],
    *,
    seats: int = 1,
    copies: int = 1,
    others: Decide | None = None,
) -> Plays:
    """Play each scenario once, from the first tick to the settlement.

    Args:
        seats: Number of players that share a scenario's market.
        copies: Number of seats that ``decide`` plays. Its results are means over them.
        others: The player of the other seats.
    """
    tables = [_table(scenario, seats, copies) for scenario in scenarios]
    malformed = np.zeros(len(tables))
    decisions: Counter[Decision] = Counter()
    equity: list[list[float]] = [[] for _ in tables]
    # In lock-step, so that a model answers all worlds as one batch.
    while live := [index for index, table in enumerate(tables) if not table.market.over]:
        own = _decided(decide, [tables[index].own for index in live])
        rest = [tables[index].seats[copies:] for index in live]
        theirs = _decided(others, rest) if others else [{} for _ in live]
        for index, mine, more in zip(live, own, theirs, strict=True):
            equity[index].append(tables[index].pnl)
            malformed[index] += sum(map(is_malformed, mine.values())) / copies
            decisions.update(mine.values())
            tables[index].market.step(mine | more)
    for curve, table in zip(equity, tables, strict=True):
        table.market.settle()
        curve.append(table.pnl)
    longest = max(map(len, equity))
    return Plays(
        equity=np.array([curve + curve[-1:] * (longest - len(curve)) for curve in equity]),
        win_rate=np.array([fmean(map(_win_rate, table.own)) for table in tables]),
        malformed=malformed / [scenario.rules.ticks for scenario in scenarios],
        decisions=decisions,
        start_balance=scenarios[0].rules.start_balance,
    )


def _table(scenario: Scenario, seats: int, copies: int) -> Table:
    market = make_market(scenario)
    return Table(market, [market.join(name) for name in names_of(scenario, seats)], copies)


def _decided(decide: Decide, seats: Sequence[Sequence[Seat]]) -> list[dict[str, Decision]]:
    """Return each table's decisions by name; all tables are asked at once."""
    decisions = iter(decide([seat for table in seats for seat in table]))
    return [{seat.account.name: next(decisions) for seat in table} for table in seats]


def is_malformed(decision: Decision) -> bool:
    """Return whether the reply could not be parsed as a decision."""
    return isinstance(decision, Hold) and decision.error is not None


def _draw(seed: int, seat: Seat) -> str:
    alone = len(seat.market.accounts) == 1
    seated = "" if alone else f":{seat.account.name}"
    return f"{seed}:{seat.scenario.scenario_id}:{seat.tick}{seated}"


def _win_rate(game: Seat) -> float:
    decided = [won for outcome in game.outcomes if (won := game.won(outcome)) is not None]
    return fmean(decided) if decided else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerResult:
    """A player's P&L by scenario in simulator dollars, and the means of its other figures.

    ``equity`` ``[ticks + 1]``: mean profit so far, before each tick and after settlement.
    ``malformed_shares`` by scenario: results that earlier versions stored have none.
    """

    pnl: tuple[float, ...]
    equity: tuple[float, ...]
    win_rate: float
    malformed: float
    drawdown: float
    malformed_shares: tuple[float, ...] = ()

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
        malformed_shares=tuple(plays.malformed.round(4).tolist()),
    )


def best_rule(worlds: Sequence[Scenario], seats: int = 1) -> tuple[str, Plays]:
    """Return the scripted rule that earns most in these worlds on all seats, and its play."""
    plays = {
        name: play(scripted(rule), worlds, seats=seats, copies=seats)
        for name, rule in RULES.items()
    }
    name = max(plays, key=lambda name: plays[name].mean_pnl)
    return name, plays[name]


def yardsticks(worlds: Sequence[Scenario]) -> dict[str, PlayerResult]:
    """Return the results of scripted agents on the same worlds: random, news and oracle."""
    return {name: result_of(play(scripted(SCRIPTED_AGENTS[name]), worlds)) for name in YARDSTICKS}
