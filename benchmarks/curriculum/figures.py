"""One figure a level: what the fleet earned by decisions, and the end on unseen worlds by arm."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from benchmarks.curriculum.results import RunResult

matplotlib.use("svg")


def draw(results: Sequence[RunResult], directory: Path) -> list[Path]:
    """Draw the levels that have results → the files."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for level in sorted({run.key.level for run in results}):
        target = directory / f"curriculum-{level}.png"
        _level([run for run in results if run.key.level == level], level, target)
        drawn.append(target)
    return drawn


def _level(runs: Sequence[RunResult], level: str, target: Path) -> None:
    """Left: hours, mean and range of the seeds. Right: the same of the ends; of one seed its 95 %
    interval over worlds.

    The lines of base model and rule are those of the first run. All runs meet the same worlds.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    arms: dict[str, list[RunResult]] = {}
    for run in runs:
        arms.setdefault(" ".join([run.key.arm, *run.key.settings]), []).append(run)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for place, (name, own) in enumerate(sorted(arms.items())):
        colour = f"C{place}"
        decisions = min((_curve(run)[0] for run in own), key=len)
        hours = [*zip(*(_curve(run)[1] for run in own), strict=False)]
        marker = "o" if len(hours) == 1 else None
        left.plot(decisions, [*map(fmean, hours)], color=colour, label=name, marker=marker)
        left.fill_between(
            decisions, [*map(min, hours)], [*map(max, hours)], color=colour, alpha=0.2
        )
        ends = [run.pnl for run in own]
        low, high = min(ends), max(ends)
        if len(own) == 1:
            low, high = (own[0].base_pnl + bound for bound in own[0].gain[1:])
        mean = fmean(ends)
        right.errorbar([place], [mean], [[mean - low], [high - mean]], fmt="o", color=colour)
    for axes in (left, right):
        axes.axhline(runs[0].rule_pnl, color="black", ls="--", lw=1)
        axes.axhline(runs[0].base_pnl, color="grey", ls=":", lw=1)
    left.set(xlabel="decisions played", ylabel="the fleet's mean P&L, $", xscale="log")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter(EngFormatter())
    left.xaxis.set_minor_formatter(NullFormatter())
    left.legend(loc="best", fontsize="small")
    counts = {name: len(own) for name, own in sorted(arms.items())}
    seeds = "seeds: " + ", ".join(f"{name}: {count}" for name, count in counts.items())
    if len({*counts.values()}) == 1:
        seeds = f"{len(runs) // len(counts)} seeds each"
    right.set(
        xticks=range(len(arms)),
        xlim=(-0.5, len(arms) - 0.5),
        ylabel="P&L on unseen worlds, $",
        title=seeds,
    )
    right.set_xticklabels(sorted(arms), rotation=15, ha="right")
    best, base = f"-- best rule ({runs[0].rule})", "·· base model"
    figure.suptitle(f"{level}: {best}, {base}")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _curve(run: RunResult) -> tuple[list[float], list[float]]:
    """Decisions played so far and P&L: of hours, or the points that PPO stores."""
    points: list[Any] = [*run.curve]
    if not points:
        return [run.decisions], [run.pnl]
    if not isinstance(points[0], dict):
        return [point[0] for point in points], [point[1] for point in points]
    each = run.decisions / len(points)
    return [each * (n + 1) for n in range(len(points))], [point["fleet_pnl"] for point in points]
