"""The report of a match: ``report.json``, three plots and a Markdown page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from babylon.core.home import make_directory
from babylon.core.types import Verdict
from babylon.evaluation.arena.match import Look
from babylon.evaluation.arena.play import PlayerResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = ("differences.png", "equity.png", "sequence.png")
GREY = "#808080"  # readable on a light and on a dark page
_COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def write_report(
    directory: Path,
    results: Mapping[str, PlayerResult],
    looks: Sequence[Look],
    facts: Mapping[str, object],
) -> None:
    """Write a match's ``report.json`` and plots. Blocking.

    Args:
        results: Results by name: champion, challenger, then yardsticks, on the same worlds.
        looks: The looks at their difference; empty after a single look.
        facts: More keys of ``report.json``.
    """
    make_directory(directory)
    plot_differences(results, directory / PICTURES[0])
    plot_equity(results, directory / PICTURES[1])
    if looks:
        plot_sequence(looks, directory / PICTURES[2])
    record = {
        **facts,
        "looks": [asdict(look) for look in looks],
        "players": {name: asdict(result) for name, result in results.items()},
    }
    temporary = directory / ".report.json"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    os.replace(temporary, directory / "report.json")


def verdict_markdown(verdict: Verdict) -> str:
    """Return a verdict's page, without the figures that were not measured."""
    rows = [
        (
            "mean P&L, $" if verdict.in_dollars else "mean score",
            verdict.pnl_before,
            verdict.pnl_after,
            ".1f" if verdict.in_dollars else ".4g",
        ),
        ("win rate", verdict.win_rate_before, verdict.win_rate_after, ".1%"),
        ("mean largest drawdown, $", verdict.drawdown_before, verdict.drawdown_after, ".1f"),
        ("malformed replies", verdict.malformed_before, verdict.malformed_after, ".1%"),
    ]
    table = [
        f"| {name} | {before:{form}} | {after:{form}} |"
        for name, before, after, form in rows
        if before is not None and after is not None
    ]
    window = verdict.claim.window_id
    without = "this gate has none" if verdict.promote else "the match did not promote"
    yardsticks = [f"| {name} | {pnl:.1f} |" for name, pnl in verdict.yardsticks.items()]
    # A table of their own: differences to the parent, in other worlds than the gate's.
    siblings = [f"| {name} | {gain:+.1f} |" for name, gain in verdict.siblings.items()]
    return "\n".join(
        [
            f"# Window {window}, policy {verdict.policy_version}: {verdict.ruling}",
            "",
            verdict.reason,
            "",
            *(["| | champion | challenger |", "| --- | ---: | ---: |", *table] if table else []),
            "",
            *(["| yardstick | mean P&L, $ |", "| --- | ---: |", *yardsticks] if yardsticks else []),
            "",
            *(
                ["| sibling | P&L less the parent's, $ |", "| --- | ---: |", *siblings, ""]
                * bool(siblings)
            ),
            f"Decided by {verdict.evidence}; suite `{verdict.suite_digest or 'none'}`.",
            f"Recorded play: {verdict.off_policy or f'not checked, {without}'}.",
            f"Frozen suite: {verdict.frozen or f'not played, {without}'}.",
        ]
    )


def plot_differences(results: Mapping[str, PlayerResult], path: Path) -> None:
    """Plot the second player's P&L minus the first's, one bar per scenario, sorted."""
    (first, before), (second, after) = list(results.items())[:2]

    def draw(axes: Axes) -> None:
        differences = np.sort(np.subtract(after.pnl, before.pnl))
        colors = np.where(differences < 0, "tab:red", "tab:green")
        axes.bar(np.arange(len(differences)), differences, width=1.0, color=colors)
        mean = differences.mean()
        axes.axhline(mean, color=GREY, linestyle="--", label=f"mean {mean:+.1f}")
        axes.set_xlabel("scenario, sorted by difference")
        axes.set_ylabel("P&L difference, $")
        axes.set_title(f"P&L by scenario: {second} minus {first}")
        axes.legend(loc="upper left")

    _save(path, draw)


def plot_equity(results: Mapping[str, PlayerResult], path: Path) -> None:
    """Plot mean profit by tick. Lines: the two players; dotted lines: the yardsticks."""

    def draw(axes: Axes) -> None:
        for number, (name, result) in enumerate(results.items()):
            style = "-" if number < 2 else ":"
            axes.plot(result.equity, style, linewidth=2 if number < 2 else 1.5, label=name)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        axes.set_xlabel("tick (the last point: after settlement)")
        axes.set_ylabel("mean profit so far, $")
        axes.set_title("Equity curves")
        axes.legend(loc="upper left")

    _save(path, draw)


def plot_sequence(looks: Sequence[Look], path: Path) -> None:
    """Plot the confidence sequence of the paired difference, look by look."""

    def draw(axes: Axes) -> None:
        differences = [look.difference for look in looks]
        means = [one.mean for one in differences]
        axes.errorbar(
            [look.scenarios for look in looks],
            means,
            yerr=[
                [max(0.0, one.mean - one.low) for one in differences],
                [max(0.0, one.high - one.mean) for one in differences],
            ],
            fmt="o-",
            capsize=5,
            label="mean, with 95 % confidence sequence",
        )
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xlim(0, looks[-1].scenarios * 1.1)
        axes.set_xlabel("scenarios played")
        axes.set_ylabel("P&L difference, $")
        axes.set_title("Confidence sequence: challenger minus champion")
        axes.legend(loc="upper right")

    _save(path, draw)


def _save(path: Path, draw: Callable[[Axes], None]) -> None:
    # Imported here because it takes a second.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**dict.fromkeys(_COLOURED, GREY), "legend.frameon": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw(figure.subplots())
        figure.savefig(path, dpi=80, transparent=True)  # 640 pixels wide: the pages carry them
