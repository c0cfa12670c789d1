"""The closing table of ``babylon train``: window by window, and where to look next."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TypedDict

from rich.text import Text

from babylon.cli.output import print_table, printable
from babylon.core.home import Home
from babylon.core.types import Metrics, WindowResult
from babylon.core.windows import DONE, WindowState

COLUMNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "plays": ("{:d}", "", ("trajectories",)),
    "P&L": ("{:.5g}", "", ("pnl_before", "pnl_after")),
    "win %": ("{:.0%}", "%", ("win_rate_before", "win_rate_after")),
    "score": ("{:.2f}", "", ("avg_reward",)),
    "loss": ("{:.2f}", "", ("training_loss",)),
    "KL": ("{:.1g}", "", ("kl_before", "kl_after")),
}
"""Heading → format, unit in the heading, metrics (one, or before and after the update).

With window and state the table fits 80 columns.
"""


class TrainingReport(TypedDict, total=False):
    """The JSON object of ``babylon train``."""

    ok: bool
    mode: str
    hint: str
    windows: list[dict[str, object]]


def training_report(
    mode: str, results: Sequence[WindowResult], searched: str | None
) -> TrainingReport:
    """Return the report: ``ok`` if no window failed and this run trained at least one.

    ``searched`` names the range that was searched ("of the last 24 h"). If no window of it could
    be trained, ``hint`` says where to look. Continuous training may end before any window closes.
    """
    failed = [r for r in results if r.status == WindowState.FAILED]
    trained = [r for r in results if r.changed and r.status in DONE]
    ok = not failed and (bool(trained) or mode == "continuous")
    report = TrainingReport(ok=ok, mode=mode, windows=[asdict(result) for result in results])
    if not ok and not failed and searched is not None:
        report["hint"] = (
            f"no window {searched} could be trained: `babylon windows check` says what each lacks,"
            " older ones too, and `babylon train --window ID` tries one again"
        )
    return report


def window_table(
    results: Sequence[WindowResult],
) -> tuple[list[str], list[list[str | Text | None]]]:
    """Return the column names and one row a window."""
    rows: list[list[str | Text | None]] = [
        [r.window_id, r.status, *[_figure(r.metrics, *column) for column in COLUMNS.values()]]
        for r in results
    ]
    return ["window", "state", *COLUMNS], rows


def print_training(report: TrainingReport, results: Sequence[WindowResult], home: Home) -> None:
    """Print the table, each window's reason, and where to look next."""
    if results:
        columns, rows = window_table(results)
        print_table("Training, window by window", columns, rows)
    for result in results:
        print(printable(f"{result.window_id}: {result.reason}"))
    if "hint" in report:
        print(report["hint"])
    if not any(result.changed and result.status in DONE for result in results):
        return  # no policy, route or dataset is new
    print("\nWhere to look next:")
    print("  babylon model list           every policy and its verdict")
    print("  babylon deploy status        the route in force")
    print(f"  {home.datasets}    the published windows")


def _figure(metrics: Metrics, form: str, unit: str, names: tuple[str, ...]) -> Text | None:
    """Return the values of a column, as ``14→21``, without the unit that its heading has."""
    values = [metrics.get(name) for name in names]
    if all(value is None for value in values):
        return None
    parts = ["–" if value is None else form.format(value).removesuffix(unit) for value in values]
    return Text("→".join(parts))
