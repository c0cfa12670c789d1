"""The report of a match: ``report.json``, three plots and a Markdown page."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from babylon.core.home import make_directory
from babylon.core.types import Verdict
from babylon.evaluation.arena.match import Look
from babylon.evaluation.arena.match_plots import plot_differences, plot_equity, plot_sequence
from babylon.evaluation.arena.play import PlayerResult

PICTURES = ("differences.png", "equity.png", "sequence.png")


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
        ("mean P&L, $", verdict.pnl_before, verdict.pnl_after, ".1f"),
        ("win rate", verdict.win_rate_before, verdict.win_rate_after, ".1%"),
        ("mean largest drawdown, $", verdict.drawdown_before, verdict.drawdown_after, ".1f"),
        ("malformed replies", verdict.malformed_before, verdict.malformed_after, ".1%"),
    ]
    table = [
        f"| {name} | {before:{form}} | {after:{form}} |"
        for name, before, after, form in rows
        if before is not None and after is not None
    ]
    yardsticks = [f"| {name} | {pnl:.1f} |" for name, pnl in verdict.yardsticks.items()]
    window = verdict.claim.window_id
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
            f"{verdict.scenarios} scenarios, suite `{verdict.suite_digest or 'none'}`.",
            f"Recorded play: {verdict.off_policy or 'not checked, the arena did not promote'}.",
            f"Plots and all figures: `{verdict.report}`." if verdict.report else "",
        ]
    )
