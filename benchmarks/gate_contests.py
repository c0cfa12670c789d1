"""Contests for ``benchmarks.gate``: pools of real plays from which simulated gates draw worlds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from babylon.evaluation.arena.bounds import most_lost, most_won
from babylon.evaluation.arena.play import Floats, Plays, play, scripted
from babylon.evaluation.arena.ruling import Standings
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision, Order
from babylon.game.market.scenario import STARTER, Rules, Scenario
from babylon.game.market.scripted import ScriptedAgent, buy, news_follower, random_trader

CHAMPION = 0.6  # share of ticks in which the champion follows the news
BETTER = 1.1
WORSE = (0.99, 0.9)
SEATS = 8
RUIN = -3.0  # dollars: true difference of the skewed traders
WON, WINS, LOST = 1000.0, 0.02, 2.0  # dollars won in a share of the worlds, else lost
CROWDED = Rules(news_reliability=0.65)  # alone, following the news pays; among eight it does not
CROWD_CHAMPION = 0.3  # its share
Draw = Callable[[Floats, np.random.Generator], Floats]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A champion and a challenger on a pool of worlds.

    ``tossed``: in every world a coin decides who is the challenger. ``added`` replaces the
    challenger's P&L by the champion's plus drawn dollars. ``crowds``: see ``Standings``. ``drift``:
    dollars added in the older half of the worlds and taken away in the newer half.
    """

    name: str
    champion: Plays
    challenger: Plays
    better: bool = False
    tossed: bool = False
    added: Draw | None = None
    drift: float = 0.0
    crowds: dict[int, Floats] = field(default_factory=dict)
    rules: Rules = STARTER
    truth: float | None = None  # of ``added``, dollars

    @property
    def difference(self) -> Floats:
        return self.challenger.pnl - self.champion.pnl

    @property
    def true_gain(self) -> float:
        """True mean difference, dollars; in a crowd that with the most copies."""
        if self.truth is not None:
            return self.truth
        return 0.0 if self.tossed else float(self.difference.mean())

    def drawn(self, drawn: Indices, random: np.random.Generator) -> Standings:
        """Return a gate's play of the drawn worlds."""
        swapped = (random.random(len(drawn)) < 0.5) & self.tossed
        champion = _either(self.champion, self.challenger, drawn, swapped)
        challenger = _either(self.challenger, self.champion, drawn, swapped)
        if self.added is not None:
            challenger = _ending(champion, champion.pnl + self.added(champion.pnl, random))
        if self.drift:  # the newest worlds come first
            newer = np.arange(len(drawn)) < len(drawn) // 2
            centred = challenger.pnl - self.difference.mean()
            challenger = _ending(challenger, centred + np.where(newer, -self.drift, self.drift))
        crowds = {copies: pnl[drawn] for copies, pnl in self.crowds.items()}
        return Standings(champion=champion, challenger=challenger, crowds=crowds)


def trader(share: float) -> ScriptedAgent:
    """Return an agent that follows the news in a share of the ticks, else trades at random."""

    def decide(seat: Seat, random: Random) -> Decision:
        believes = random.random() < share
        return (news_follower if believes else random_trader)(seat, random)

    return decide


def bolder(more: float) -> ScriptedAgent:
    """Return the champion with larger stakes where it is right: small, certain gains."""

    def decide(seat: Seat, random: Random) -> Decision:
        decision = trader(CHAMPION)(seat, random)
        question = seat.scenario.question(decision.market) if isinstance(decision, Order) else None
        if not isinstance(decision, Order) or question is None:
            return decision
        right = decision.kind.value == f"buy_{question.outcome.value.lower()}"
        return replace(decision, amount=decision.amount * (1 + more)) if right else decision

    return decide


def ruined(seat: Seat, random: Random) -> Decision:
    """Stake the largest order on the wrong side in every tick."""
    question = seat.scenario.questions[seat.tick % len(seat.scenario.questions)]
    return buy(question.market_id, question.outcome.other, min(150, int(seat.balance)))


def contests(worlds: list[Scenario], seed: int) -> Iterator[Contest]:
    """Play the pool, and yield every null, then every better and worse challenger."""
    champion = play(scripted(trader(CHAMPION)), worlds)
    again = play(scripted(trader(CHAMPION), seed=1), worlds)
    same = Contest(name="symmetric: the same, own draws", champion=champion, challenger=again)
    yield replace(same, tossed=True)
    yield replace(same, name="t(2), $100", added=_student, truth=0.0)
    for share in (0.02, 0.01, 0.005):
        yield replace(same, name=f"loses $1000 in {share:.1%}", added=_rare(share), truth=0.0)
    yield from _skewed(champion, worlds)
    yield replace(same, name="drift: -$20 in newer worlds, +$20 in older", drift=20.0, truth=0.0)
    yield _crowded(len(worlds) // 4, seed)
    for draws_seed, draws in ((0, "common draws"), (1, "own draws")):
        ratios = (BETTER, *WORSE)
        shares = shares_of(worlds, [ratio * champion.mean_pnl for ratio in ratios], draws_seed)
        for ratio, share in zip(ratios, shares, strict=True):
            yield Contest(
                name=f"{ratio - 1:+.0%}, {draws}",
                champion=champion,
                challenger=play(scripted(trader(share), draws_seed), worlds),
                better=ratio > 1,
            )
    rare = WON * WINS - LOST * (1 - WINS)
    yield replace(same, name="wins $1000 in 2.0%, loses $2", added=_wins, truth=rare, better=True)


def shares_of(worlds: list[Scenario], targets: Sequence[float], seed: int) -> list[float]:
    """Return the shares whose mean P&L on the worlds is about each of ``targets`` dollars.

    Mean P&L is nearly linear in the share, so a few shares are played and the rest interpolated.
    """
    grid = np.linspace(0.5, 0.7, 5)
    pnl = [play(scripted(trader(float(share)), seed), worlds).mean_pnl for share in grid]
    return [float(share) for share in np.interp(targets, pnl, grid)]


def bound(rules: Rules) -> float:
    return most_lost(rules) + most_won(rules)


def _student(pnl: Floats, random: np.random.Generator) -> Floats:
    limit = bound(STARTER)
    return np.clip(100 * random.standard_t(2, len(pnl)), -limit, limit)


def _rare(share: float) -> Draw:
    def added(pnl: Floats, random: np.random.Generator) -> Floats:
        return np.where(random.random(len(pnl)) < share, -1000.0, 1000.0 * share / (1 - share))

    return added


def _wins(pnl: Floats, random: np.random.Generator) -> Floats:
    return np.where(random.random(len(pnl)) < WINS, WON, -LOST)


def _skewed(champion: Plays, worlds: list[Scenario]) -> Iterator[Contest]:
    """Yield traders that gain a little and in few worlds lose all: truly ``RUIN`` worse."""
    gained = play(scripted(bolder(0.1)), worlds).pnl - champion.pnl
    lost = play(scripted(ruined), worlds).pnl - champion.pnl
    for share in (0.01, 0.005):
        scale = (RUIN - share * lost.mean()) / ((1 - share) * gained.mean())
        # The pool's pairs of gain and loss are drawn together, so worlds stay real.
        random = np.random.default_rng(0)
        ruin = random.random(len(lost)) < share

        def added(
            pnl: Floats, random: np.random.Generator, scale: float = scale, share: float = share
        ) -> Floats:
            world = random.integers(len(lost), size=len(pnl))
            loses = random.random(len(pnl)) < share
            return np.where(loses, lost[world], scale * gained[world])

        yield Contest(
            name=f"skewed trader, ruined in {share:.1%}",
            champion=champion,
            challenger=_ending(champion, champion.pnl + np.where(ruin, lost, scale * gained)),
            added=added,
            truth=RUIN,
        )


def _crowded(count: int, seed: int) -> Contest:
    """Return the news follower in shared markets: it wins alone and loses among its copies."""
    worlds = unseen_scenarios("gate", f"crowd:{seed}", count, CROWDED)
    champion, challenger = scripted(trader(CROWD_CHAMPION)), scripted(news_follower)
    return Contest(
        name="crowding: wins alone, loses among eight",
        champion=play(champion, worlds, seats=SEATS, copies=SEATS),
        challenger=play(challenger, worlds, seats=SEATS, copies=SEATS),
        crowds={
            copies: play(challenger, worlds, seats=SEATS, copies=copies, others=champion).pnl
            for copies in (1, SEATS // 2)
        },
        rules=CROWDED,
    )


def _ending(plays: Plays, pnl: Floats) -> Plays:
    """Return plays that end with another P&L."""
    return replace(plays, equity=np.column_stack([plays.equity[:, :-1], pnl]))


def _either(one: Plays, other: Plays, drawn: Indices, swapped: NDArray[np.bool_]) -> Plays:
    def either(mine: Floats, theirs: Floats) -> Floats:
        where = swapped.reshape(-1, *[1] * (mine.ndim - 1))
        chosen: Floats = np.where(where, theirs[drawn], mine[drawn])
        return chosen

    return replace(
        one,
        equity=either(one.equity, other.equity),
        win_rate=either(one.win_rate, other.win_rate),
        malformed=either(one.malformed, other.malformed),
    )
