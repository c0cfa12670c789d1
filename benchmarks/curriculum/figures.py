"""One figure a level: the fleet's P&L by decisions and by processor time, and each arm's end."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from benchmarks.curriculum.results import RunResult

matplotlib.use("svg")

FAR = 3  # times the best arm's P&L


def draw(results: Sequence[RunResult], directory: Path) -> list[Path]:
    """Draw the levels that have results → the files."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for level in sorted({run.key.level for run in results}):
        target = directory / f"curriculum-{level}.png"
        _level([run for run in results if run.key.level == level], level, target)
        drawn.append(target)
    return drawn


def curve(run: RunResult) -> tuple[list[float], list[float], list[float]]:
    """Decisions and processor time so far, and P&L: of hours, or the points that PPO stores.

    PPO's steps take equal times.
    """
    points: list[Any] = [*run.curve]
    if not points:
        return [run.decisions], [run.cpu_s], [run.pnl]
    if not isinstance(points[0], dict):
        decisions, pnl = map(list, zip(*points, strict=True))
        return decisions, [done / run.decisions * run.cpu_s for done in decisions], pnl
    each = run.decisions / len(points)
    seconds = [*accumulate(point["cpu_s"] for point in points)]
    pnl = [point["fleet_pnl"] for point in points]
    return [each * (n + 1) for n in range(len(points))], seconds, pnl


def _level(runs: Sequence[RunResult], level: str, target: Path) -> None:
    """Left and middle: hours, mean and range of the seeds, by decisions and by processor time.
    Right: the same of the ends; of one seed its 95 % interval over worlds.

    The lines of base model and rule are those of the first run. All runs meet the same worlds. A
    rule that earns ``FAR`` times what any arm does would flatten the curves, and has no line.
    """
    from matplotlib import pyplot

    arms: dict[str, list[RunResult]] = {}
    for run in runs:
        arms.setdefault(" ".join([run.key.arm, *run.key.settings]), []).append(run)
    figure, panels = pyplot.subplots(
        1, 3, figsize=(16, 4), width_ratios=(4, 4, 5), layout="constrained"
    )
    by_decisions, by_seconds, ends = panels
    for place, (name, own) in enumerate(sorted(arms.items())):
        decisions, seconds, hours = zip(*map(curve, own), strict=True)
        for axes, spent in ((by_decisions, decisions), (by_seconds, seconds)):
            _band(axes, spent, hours, name, f"C{place}")
        _end(ends, place, own)
    for axes in panels:
        axes.axhline(runs[0].base_pnl, color="grey", ls=":", lw=1)
        if runs[0].rule_pnl < FAR * max(run.pnl for run in runs):
            axes.axhline(runs[0].rule_pnl, color="black", ls="--", lw=1)
    _label(by_decisions, "decisions played")
    _label(by_seconds, "processor time, seconds")
    by_decisions.set_ylabel("the fleet's mean P&L, $")
    by_decisions.legend(loc="best", fontsize="small")
    ends.set(
        xticks=range(len(arms)), xlim=(-0.5, len(arms) - 0.5), ylabel="P&L on unseen worlds, $"
    )
    labels = [f"{name} seeds:\u00a0{len(own)}" for name, own in sorted(arms.items())]
    ends.set_xticklabels(
        [label.replace(" ", "\n").replace("=", "=\n") for label in labels], fontsize="x-small"
    )
    best, base = f"{runs[0].rule} {runs[0].rule_pnl:.0f}", f"{runs[0].base_pnl:.0f}"
    figure.suptitle(f"{level}: -- best rule ({best}), ·· base model ({base})")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _band(
    axes: Any,
    spent: Sequence[Sequence[float]],
    hours: Sequence[Sequence[float]],
    name: str,
    colour: str,
) -> None:
    """Draw mean and range of the seeds' hours over the mean of what they spent."""
    along, mean, low, high = (
        [*map(function, zip(*seeds, strict=False))]
        for function, seeds in ((fmean, spent), (fmean, hours), (min, hours), (max, hours))
    )
    axes.plot(along, mean, color=colour, label=name, marker="o" if len(along) == 1 else None)
    axes.fill_between(along, low, high, color=colour, alpha=0.2)


def _end(axes: Any, place: int, own: Sequence[RunResult]) -> None:
    ends = [run.pnl for run in own]
    low, high = min(ends), max(ends)
    if len(own) == 1:
        low, high = (own[0].base_pnl + bound for bound in own[0].gain[1:])
    mean = fmean(ends)
    axes.errorbar([place], [mean], [[mean - low], [high - mean]], fmt="o", color=f"C{place}")


def _label(axes: Any, name: str) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set(xlabel=name, xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
