"""A match as pictures: where the difference comes from, how money grew, when it was clear."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from babylon.evaluation.arena.match import Look
from babylon.evaluation.arena.player_result import Result


def plot_differences(results: Mapping[str, Result], path: Path) -> None:
    """The P&L of the second less the first's, a bar a scenario, from worst to best."""
    (first, before), (second, after) = list(results.items())[:2]

    def draw(axes: Axes) -> None:
        differences = np.sort(np.subtract(after.pnl, before.pnl))
        colors = np.where(differences < 0, "tab:red", "tab:green")
        axes.bar(np.arange(len(differences)), differences, width=1.0, color=colors)
        mean = differences.mean()
        axes.axhline(mean, color="black", linestyle="--", label=f"mean {mean:+.1f}")
        axes.set_xlabel("scenario, in the order of the difference")
        axes.set_ylabel("P&L difference, $")
        axes.set_title(f"P&L by scenario: {second} less {first}")
        axes.legend(loc="upper left")

    _save(path, draw)


def plot_equity(results: Mapping[str, Result], path: Path) -> None:
    """Mean profit tick by tick; the first two stand out, the others are yardsticks."""

    def draw(axes: Axes) -> None:
        for number, (name, result) in enumerate(results.items()):
            style = "-" if number < 2 else ":"
            axes.plot(result.equity, style, linewidth=2 if number < 2 else 1.5, label=name)
        axes.axhline(0, color="lightgrey", linewidth=0.8, zorder=0)
        axes.set_xlabel("tick (the last point: after settlement)")
        axes.set_ylabel("mean profit so far, $")
        axes.set_title("Equity curves")
        axes.legend(loc="upper left")

    _save(path, draw)


def plot_sequence(looks: Sequence[Look], path: Path) -> None:
    """The confidence sequence of the paired difference, look by look, against zero."""

    def draw(axes: Axes) -> None:
        means = [look.difference.mean for look in looks]
        axes.errorbar(
            [look.scenarios for look in looks],
            means,
            yerr=[look.difference.high - mean for look, mean in zip(looks, means, strict=True)],
            fmt="o-",
            capsize=5,
            label="mean, and where the truth is at all looks together (95 %)",
        )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlim(0, looks[-1].scenarios * 1.1)
        axes.set_xlabel("scenarios played")
        axes.set_ylabel("P&L difference, $")
        axes.set_title("Confidence sequence: challenger less champion")
        axes.legend(loc="upper right")

    _save(path, draw)


def _save(path: Path, draw: Callable[[Axes], None]) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=120)
