"""How often recorded play vetoes a challenger that is no worse, and one that loses.

    python -m benchmarks.veto [--runs 400]

A player chose one of two actions at random in every play. The challenger prefers the first one,
with the probability 0.7 or 0.9. The second one pays nothing, the first one pays the same to all
plays of a market, and a little noise is added. Exits with 1 if more than 1 % of the challengers
that are no worse are vetoed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from babylon.evaluation.arena.held_out import off_policy
from babylon.evaluation.arena.play import Floats

MARKETS = ((8, 16), (16, 8), (32, 8), (64, 8), (128, 4))  # and plays of each
PREFERENCES = (0.7, 0.9)
NOISE_USD = 20.0
MOST_FALSE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``pays(generator, markets)`` gives the dollars of the first action in each market."""

    name: str
    loses: bool
    pays: Callable[[np.random.Generator, int], Floats]


def rare_wins(share: float, usd: float) -> Case:
    """A share of the markets pays for the losses of all others: the mean is zero."""
    lost = -usd * share / (1 - share)
    return Case(
        name=f"{usd:,.0f} in {share:.0%} of markets",
        loses=False,
        pays=lambda generator, markets: np.where(generator.random(markets) < share, usd, lost),
    )


def shifted(usd: float) -> Case:
    """The markets pay +200 or -200, less ``usd``."""
    return Case(
        name=f"a coin of 200, less {usd:.0f}",
        loses=usd > 0,
        pays=lambda generator, markets: generator.choice([-200.0, 200.0], markets) - usd,
    )


CASES = (
    shifted(0),
    *(rare_wins(share, 1000) for share in (0.2, 0.1, 0.05, 0.02, 0.01)),
    rare_wins(0.1, 300),
    rare_wins(0.05, 300),
    rare_wins(0.02, 2000),
    *(shifted(usd) for usd in (50, 100, 200)),
)


def share_vetoed(case: Case, markets: int, plays: int, preference: float, runs: int) -> float:
    """Return the share of the runs whose interval vetoes, of those that give an estimate."""
    generator = np.random.default_rng(0)
    scenarios = np.repeat(np.arange(markets).astype(str), plays).tolist()
    verdicts = []
    for _ in range(runs):
        first = generator.random((markets, plays)) < 0.5
        ratios = np.log(np.where(first, preference, 1 - preference) / 0.5)
        pnl = np.where(first, case.pays(generator, markets)[:, None], 0)
        pnl += generator.normal(0, NOISE_USD, first.shape)
        found = off_policy(ratios.ravel(), pnl.ravel(), scenarios)
        if found.high is not None:
            verdicts.append(found.veto)
    return float(np.mean(verdicts)) if verdicts else 0.0


def rows(runs: int) -> Iterator[tuple[Case, int, int, list[float]]]:
    for case in CASES:
        for markets, plays in MARKETS:
            yield (
                case,
                markets,
                plays,
                [share_vetoed(case, markets, plays, one, runs) for one in PREFERENCES],
            )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=400, help="Challengers of each case.")
    options = parser.parse_args(arguments)
    worst = 0.0
    print("| the first action pays, USD | markets × plays | vetoed at 0.7 | at 0.9 |")
    print("| --- | --- | ---: | ---: |")
    for case, markets, plays, shares in rows(options.runs):
        worst = worst if case.loses else max(worst, *shares)
        cells = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| {case.name} | {markets} × {plays} | {cells} |", flush=True)
    print(f"\nOf challengers that are no worse, at most {worst:.1%} are vetoed in a case.")
    return int(worst > MOST_FALSE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
