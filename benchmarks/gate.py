"""Does the gate let only better challengers through? ``python -m benchmarks.gate [--gates 500]``

Champion and challengers are scripted traders who believe the news in a share of the ticks and
trade at random in the others. Each plays the same pool of worlds, in the real game, once; a
simulated gate draws its scenarios from what they came to, batch by batch, and rules with the
arena's own rule. The pool is the truth: shares are chosen so that a challenger's mean P&L in it is
the stated multiple of the champion's. Draws are with replacement: without, a budget that is a
quarter of the pool would know the truth better than as many fresh worlds do.

- *null*: the champion once more, with draws of its own. Who of the two is called the challenger is
  tossed up anew in every scenario, so that their true difference is exactly zero.
- *better*, *worse*: with the champion's draws, as two checkpoints have in the arena; and with
  draws of their own, which no two checkpoints have there: nothing is left of the pairing but the
  worlds.

Exits with 1 when a bound is broken: the null promoted in more than 5 % of the gates, a worse one
in more than 1 %, one that is 10 % better in less than 80 %.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from babylon.core.settings import load_settings
from babylon.evaluation.arena.match import BATCH, look_at, ruled
from babylon.evaluation.arena.play import Floats, Plays, play, scripted
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.orders import Decision
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import ScriptedAgent, news_follower, random_trader
from babylon.game.market.seat import Seat

POOL = 8192
CHAMPION = 0.6  # share of ticks in which the news is believed
BETTER = 1.1
WORSE = (0.99, 0.9)
MAX_NULL, MAX_WORSE, MIN_BETTER = 0.05, 0.01, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One kind of challenger; ``bound`` says whether a share of promotions is as it must be."""

    name: str
    champion: Plays
    challenger: Plays
    tossed: bool = False
    bound: Callable[[float], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What many gates of one contest came to; shares of the gates."""

    contest: str
    ratio: float  # true mean P&L, challenger's over champion's
    deviation: float  # of the paired difference, dollars
    promoted: float
    rejected: float
    insufficient: float
    scenarios: float  # mean
    ok: bool


def trader(share: float) -> ScriptedAgent:
    """Believes the news in this share of the ticks, and else trades at random."""

    def decide(seat: Seat, random: Random) -> Decision:
        believes = random.random() < share
        return (news_follower if believes else random_trader)(seat, random)

    return decide


def shares_of(worlds: list[Scenario], targets: Sequence[float], seed: int) -> list[float]:
    """The shares whose mean P&L on the worlds is about so many dollars: it grows with the share,
    nearly along a line, so by interpolation between a few that are played."""
    grid = np.linspace(0.5, 0.7, 5)
    pnl = [play(scripted(trader(float(share)), seed), worlds).mean_pnl for share in grid]
    return [float(share) for share in np.interp(targets, pnl, grid)]


def contests(worlds: list[Scenario]) -> Iterator[Contest]:
    champion = play(scripted(trader(CHAMPION)), worlds)
    again = play(scripted(trader(CHAMPION), seed=1), worlds)
    yield Contest(
        name="null: the same, draws of its own",
        champion=champion,
        challenger=again,
        tossed=True,
        bound=lambda promoted: promoted <= MAX_NULL,
    )
    ratios = (BETTER, *WORSE)
    for seed, draws in ((0, "common draws"), (1, "draws of its own")):
        shares = shares_of(worlds, [ratio * champion.mean_pnl for ratio in ratios], seed)
        for ratio, share in zip(ratios, shares, strict=True):
            yield Contest(
                name=f"{ratio - 1:+.0%}, {draws}",
                champion=champion,
                challenger=play(scripted(trader(share), seed), worlds),
                bound=_bound(ratio),
            )


def _bound(ratio: float) -> Callable[[float], bool]:
    if ratio > 1:
        return lambda promoted: promoted >= MIN_BETTER
    return lambda promoted: promoted <= MAX_WORSE


def simulate(contest: Contest, gates: int, budget: int, seed: int) -> Outcome:
    """Many gates, each on scenarios drawn from the pool with replacement."""
    random = np.random.default_rng(seed)
    ended: Counter[str] = Counter()
    scenarios = 0
    for _ in range(gates):
        drawn = random.choice(len(contest.champion.pnl), budget)
        swapped = (random.random(budget) < 0.5) & contest.tossed
        ruling, used = gate(
            _drawn(contest.champion, contest.challenger, drawn, swapped),
            _drawn(contest.challenger, contest.champion, drawn, swapped),
        )
        ended[ruling] += 1
        scenarios += used
    promoted = ended["promote"] / gates
    difference = contest.challenger.pnl - contest.champion.pnl
    return Outcome(
        contest=contest.name,
        ratio=1.0 if contest.tossed else contest.challenger.mean_pnl / contest.champion.mean_pnl,
        deviation=float(difference.std()),
        promoted=promoted,
        rejected=ended["reject"] / gates,
        insufficient=ended["insufficient"] / gates,
        scenarios=scenarios / gates,
        ok=contest.bound is None or contest.bound(promoted),
    )


def gate(champion: Plays, challenger: Plays) -> tuple[str, int]:
    """(ruling, scenarios used): look after every batch, as the arena does."""
    budget = len(champion.pnl)
    for end in range(BATCH, budget + BATCH, BATCH):
        before, after = _first(champion, end), _first(challenger, end)
        look = look_at(before, after, budget)
        if ended := ruled(before, after, look, budget):
            return ended[0], look.scenarios
    raise AssertionError("the last look rules")


def _first(plays: Plays, count: int) -> Plays:
    return replace(
        plays,
        equity=plays.equity[:count],
        win_rate=plays.win_rate[:count],
        malformed=plays.malformed[:count],
    )


def _drawn(one: Plays, other: Plays, drawn: NDArray[np.int64], swapped: NDArray[np.bool_]) -> Plays:
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


def whole_gate_s(checkpoint: str, budget: int) -> float:
    """Wall-clock seconds that both sides' play of the whole budget takes, loading left out: the
    checkpoint against itself, with draws of its own."""
    worlds = unseen_scenarios("gate", "timed", budget)
    players = [checkpoint_player(checkpoint, seed) for seed in (0, 1)]
    started = time.monotonic()
    for first in range(0, budget, BATCH):
        for player in players:
            play(player, worlds[first : first + BATCH])
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", type=int, default=500, help="simulated gates of each kind")
    parser.add_argument("--pool", type=int, default=POOL, help="worlds that are played")
    parser.add_argument("--budget", type=int, help="scenarios of a gate at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", help="time a whole gate of this checkpoint instead")
    options = parser.parse_args()
    budget = options.budget or load_settings().evaluation.scenarios
    if options.model:
        print(f"{budget} scenarios, both sides: {whole_gate_s(options.model, budget):.1f} s")
        return
    started = time.monotonic()
    worlds = unseen_scenarios("gate", f"benchmark:{options.seed}", options.pool)
    outcomes = [simulate(c, options.gates, budget, options.seed) for c in contests(worlds)]
    if options.json:
        print(json.dumps([{f: getattr(o, f) for f in o.__slots__} for o in outcomes]))
    else:
        print(f"{options.gates} gates each, at most {budget} scenarios, pool of {options.pool}\n")
        print(
            "| challenger | true P&L | sd of difference | promoted | rejected | insufficient"
            " | mean scenarios | |"
        )
        print("| --- " * 8 + "|")
        print("\n".join(map(_row, outcomes)))
        print(f"\n{time.monotonic() - started:.0f} s")
    sys.exit(0 if all(outcome.ok for outcome in outcomes) else 1)


def _row(outcome: Outcome) -> str:
    return (
        f"| {outcome.contest} | {outcome.ratio:.1%} | ${outcome.deviation:.0f}"
        f" | {outcome.promoted:.1%} | {outcome.rejected:.1%} | {outcome.insufficient:.1%}"
        f" | {outcome.scenarios:.0f} | {'' if outcome.ok else 'BROKEN'} |"
    )


if __name__ == "__main__":
    main()
