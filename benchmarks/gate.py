"""Error rates of the gate: the share of challengers that it promotes, by their true skill.

    python -m benchmarks.gate [--gates 500] [--pool 8192] [--budget N] [--json]
    python -m benchmarks.gate --model CHECKPOINT      time one whole gate of a checkpoint instead

Prints a Markdown table with one row per challenger, then a year of hourly gates. Exits with 1 if a
bound is broken: a challenger that is no better promoted in more than 2.5 % of the gates, a 10 %
better one in less than 80 %, or updates of no true gain promoted in more than 2.5 % of a year.

Champion and challengers are scripted traders who follow the news in a share of the ticks and trade
at random in the others (``benchmarks.gate_contests``). Each plays the same pool of worlds once in
the real game. A simulated gate draws worlds from these results with replacement, batch by batch,
and applies the arena's rule. The pool defines the true P&L. *bound alone*: promotions by the bound,
without the other guards.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from babylon.core.memory import free_memory_is_kept
from babylon.core.settings_loading import load_settings
from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth
from babylon.evaluation.arena.play import Floats, Plays, play
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.ruling import Standings, ruled
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import BATCH, GateWorlds, simulated
from babylon.game.market.scenario import STARTER, make_scenario
from benchmarks.gate_contests import SEATS, Contest, bound, contests

POOL = 8192
MAX_NULL, MIN_BETTER = 0.025, 0.8
HOURS = 24 * 365


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRates:
    """The results of many gates of one contest, as shares of the gates."""

    contest: str
    gain: float  # true mean difference, dollars
    deviation: float  # standard deviation of the paired difference, dollars
    promoted: float
    bound_alone: float
    rejected: float
    insufficient: float
    scenarios: float  # mean
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Year:
    """A year of hourly gates, each for an update of the champion of that hour.

    Dollars a world. ``claimed``: sum of the gains that the promoting gates measured. ``true``: sum
    of their true gains. ``lost``: deepest fall of the champion's true skill below an earlier one.
    ``false_share``: promotions of updates without a true gain, as a share of such updates.
    """

    updates: str
    promoted: int
    claimed: float
    true: float
    lost: float
    false_share: float
    ok: bool


def simulate(contest: Contest, gates: int, budget: int, seed: int) -> ErrorRates:
    """Simulate gates, each on worlds drawn from the pool with replacement."""
    random = np.random.default_rng(seed)
    scenario = make_scenario("rules", contest.rules)  # only its rules are read
    worlds = simulated([scenario] * budget, SEATS if contest.crowds else 1)
    ended: Counter[str] = Counter()
    scenarios = believed = 0
    for _ in range(gates):
        drawn = random.choice(len(contest.champion.pnl), budget)
        standings = contest.drawn(drawn, random)
        ruling, used = gate(standings, worlds)
        ended[ruling] += 1
        scenarios += used
        wealth = [log_wealth(one, budget) for one in standings.differences(worlds)]
        believed += bool((np.min(wealth, axis=0) >= CERTAIN)[BATCH - 1 :: BATCH].any())
    promoted, alone = ended["promote"] / gates, believed / gates
    within = promoted >= MIN_BETTER if contest.better else max(promoted, alone) <= MAX_NULL
    return ErrorRates(
        contest=contest.name,
        gain=contest.true_gain,
        deviation=float((standings.challenger.pnl - standings.champion.pnl).std()),
        promoted=promoted,
        bound_alone=alone,
        rejected=ended["reject"] / gates,
        insufficient=ended["insufficient"] / gates,
        scenarios=scenarios / gates,
        ok=within,
    )


def gate(standings: Standings, worlds: GateWorlds) -> tuple[str, int]:
    """Look after every batch, as the arena does → (ruling, scenarios used)."""
    for end in range(BATCH, worlds.budget + BATCH, BATCH):
        so_far = Standings(
            champion=_first(standings.champion, end),
            challenger=_first(standings.challenger, end),
            crowds={copies: pnl[:end] for copies, pnl in standings.crowds.items()},
        )
        if ended := ruled(so_far, worlds):
            return ended[0], len(so_far.champion.pnl)
    raise AssertionError("the last look rules")


def _first(plays: Plays, count: int) -> Plays:
    return replace(
        plays,
        equity=plays.equity[:count],
        win_rate=plays.win_rate[:count],
        malformed=plays.malformed[:count],
    )


def years(noise: Floats, budget: int, seed: int) -> list[Year]:
    """Simulate a year of each kind of updates.

    Args:
        noise: ``[pool]`` paired differences of two traders, around their mean.
    """
    random = np.random.default_rng(seed)
    kinds = {
        "do nothing": np.zeros(HOURS),
        "$1 worse each": np.full(HOURS, -1.0),
        "$0 ± 5": random.normal(0.0, 5.0, HOURS),
        "-$5 ± 10": random.normal(-5.0, 10.0, HOURS),
    }
    return [_year(name, effects, noise, budget, random) for name, effects in kinds.items()]


def _year(
    name: str, effects: Floats, noise: Floats, budget: int, random: np.random.Generator
) -> Year:
    promoted, measured = np.zeros(len(effects), bool), np.zeros(len(effects))
    room = np.full((1, budget), bound(STARTER))
    ends = np.arange(BATCH, budget + 1, BATCH)
    for start in range(0, len(effects), 256):
        part = slice(start, start + 256)
        values = random.choice(noise, (len(effects[part]), budget)) + effects[part, None]
        limits = np.broadcast_to(room, values.shape)
        certain = log_wealth(Differences(values, limits, limits), budget)[:, ends - 1] >= CERTAIN
        first = certain.argmax(axis=1)
        means = np.cumsum(values, axis=1)[:, ends - 1] / ends
        promoted[part] = certain.any(axis=1)
        measured[part] = means[np.arange(len(values)), first]
    skill = np.concatenate([[0.0], np.cumsum(np.where(promoted, effects, 0.0))])
    false_share = float(promoted[effects <= 0].mean())
    return Year(
        updates=name,
        promoted=int(promoted.sum()),
        claimed=float(measured[promoted].sum()),
        true=float(skill[-1]),
        lost=float((np.maximum.accumulate(skill) - skill).max()),
        false_share=false_share,
        ok=false_share <= MAX_NULL,
    )


def whole_gate_s(checkpoint: str, budget: int) -> float:
    """Return the wall time of a whole budget played by both sides, without loading.

    Memory is kept, as in a gate.

    The checkpoint plays against itself with other random draws.
    """
    worlds = unseen_scenarios("gate", "timed", budget)
    players = [checkpoint_player(checkpoint, seed) for seed in (0, 1)]
    started = time.monotonic()
    with free_memory_is_kept():
        for first in range(0, budget, BATCH):
            for player in players:
                play(player, worlds[first : first + BATCH])
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", type=int, default=500, help="simulated gates per challenger")
    parser.add_argument("--pool", type=int, default=POOL, help="worlds in the pool")
    parser.add_argument("--budget", type=int, help="largest number of scenarios of a gate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", help="time a whole gate of this checkpoint instead")
    options = parser.parse_args()
    budget = options.budget or load_settings().evaluation.scenarios
    if options.model:
        print(f"{budget} scenarios, both sides: {whole_gate_s(options.model, budget):.1f} s")
        return
    started = time.monotonic()
    pool = unseen_scenarios("gate", f"benchmark:{options.seed}", options.pool)
    found = list(contests(pool, options.seed))
    outcomes = [simulate(one, options.gates, budget, options.seed) for one in found]
    noise = next(one.difference for one in found if one.better)  # with common draws
    after = years(noise - noise.mean(), budget, options.seed)
    if options.json:
        rows = (
            [{f: getattr(o, f) for f in o.__slots__} for o in part] for part in (outcomes, after)
        )
        print(json.dumps(dict(zip(("gates", "years"), rows, strict=True))))
    else:
        print(f"{options.gates} gates each, at most {budget} scenarios, pool of {options.pool}\n")
        print(
            "| challenger | true gain | sd of difference | promoted | bound alone | rejected"
            " | insufficient | mean scenarios | |"
        )
        print("| --- " * 9 + "|")
        print("\n".join(map(_row, outcomes)))
        print("\n| a year of updates | promoted | claimed | true | deepest loss | false | |")
        print("| --- " * 7 + "|")
        print("\n".join(map(_year_row, after)))
        print(f"\n{time.monotonic() - started:.0f} s")
    sys.exit(0 if all(o.ok for o in outcomes) and all(year.ok for year in after) else 1)


def _row(outcome: ErrorRates) -> str:
    return (
        f"| {outcome.contest} | ${outcome.gain:+.1f} | ${outcome.deviation:.0f}"
        f" | {outcome.promoted:.1%} | {outcome.bound_alone:.1%} | {outcome.rejected:.1%}"
        f" | {outcome.insufficient:.1%} | {outcome.scenarios:.0f}"
        f" | {'' if outcome.ok else 'BROKEN'} |"
    )


def _year_row(year: Year) -> str:
    return (
        f"| {year.updates} | {year.promoted} | ${year.claimed:+.0f} | ${year.true:+.0f}"
        f" | ${year.lost:.0f} | {year.false_share:.2%} | {'' if year.ok else 'BROKEN'} |"
    )


if __name__ == "__main__":
    main()
