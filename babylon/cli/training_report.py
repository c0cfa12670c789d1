"""The closing table of ``babylon train``: window by window, and where to look next."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from babylon.cli.output import print_table
from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import DONE, WindowState

COLUMNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "plays": ("{:d}", "", ("trajectories",)),
    "P&L": ("{:.1f}", "", ("pnl_before", "pnl_after")),
    "win %": ("{:.0%}", "%", ("win_rate_before", "win_rate_after")),
    "score": ("{:.2f}", "", ("avg_reward",)),
    "loss": ("{:.2f}", "", ("training_loss",)),
    "KL": ("{:.1g}", "", ("kl_before", "kl_after")),
}
"""Heading → format, unit that the heading names, metrics (two: before and after the update).

With window and state it fits 80 columns.
"""


def training_report(
    mode: str, results: Sequence[WindowResult], searched: str | None
) -> dict[str, Any]:
    """``ok`` when no window failed and at least one was trained by this run. When windows
    were ``searched`` for ("of the last 24 h") and none could be, ``hint`` says where others wait.

    Continuous training ends when it is told to, so there no window at all is fine too.
    """
    failed = [r for r in results if r.status == WindowState.FAILED]
    trained = [r for r in results if r.changed and r.status in DONE]
    ok = not failed and (bool(trained) or mode == "continuous")
    return {
        "ok": ok,
        "mode": mode,
        **({} if ok or failed or searched is None else {"hint": _where_others_wait(searched)}),
        "windows": [asdict(result) for result in results],
    }


def _where_others_wait(searched: str) -> str:
    return (
        f"no window {searched.strip()} could be trained: `babylon windows check` says what"
        " each lacks, older ones too, and `babylon train --window ID` tries one again"
    )


def window_table(results: Sequence[WindowResult]) -> tuple[list[str], list[list[Any]]]:
    """Column names and one row a window."""
    rows = [
        [r.window_id, r.status, *[_figure(r.metrics, *column) for column in COLUMNS.values()]]
        for r in results
    ]
    return ["window", "state", *COLUMNS], rows


def print_training(
    report: dict[str, Any], results: Sequence[WindowResult], settings: Settings
) -> None:
    """The table, each window's reason, and where to look next."""
    if results:
        print_table("Training, window by window", *window_table(results))
    for result in results:
        print(f"{result.window_id}: {result.reason}")
    if "hint" in report:
        print(report["hint"])
        return
    print("\nWhere to look next:")
    print("  babylon model list           every policy and its verdict")
    print("  babylon deploy status        the route in force")
    print(f"  {settings.home.datasets}    the published windows")


def _figure(metrics: dict[str, Any], form: str, unit: str, names: tuple[str, ...]) -> Text | None:
    """``14→21``: the values of a column; the unit stands in its heading."""
    values = [metrics.get(name) for name in names]
    if all(value is None for value in values):
        return None
    parts = ["–" if value is None else form.format(value).removesuffix(unit) for value in values]
    return Text("→".join(parts))
