"""What a person sees of ``babylon demo``: progress while it runs, then a table and the verdict."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from babylon.cli.output import print_table, stderr
from babylon.cli.training_report import window_table
from babylon.ops.demo import DemoReport, Say, Step


@contextmanager
def demo_progress() -> Iterator[tuple[Say, Step]]:
    """(say a line, draw a step's bar), both on stderr; bars only on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bars: dict[str, int] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)  # type: ignore[arg-type]

        yield stderr.print, step


def print_demo(report: DemoReport) -> None:
    """The closing table, base against final, and where to look next."""
    columns, rows = window_table(report.windows)
    print_table("Hour by hour (P&L and win rate on the gate's unseen scenarios)", columns, rows)
    final = report.final
    print_table(
        f"Base against final policy on {final.scenarios} scenarios that nobody trained on",
        ["", "P&L", "win rate"],
        [
            ["base model", final.pnl_base, final.win_rate_base],
            [f"policy v{report.policy_version}", final.pnl_final, final.win_rate_final],
            ["oracle", final.pnl_oracle, None],
        ],
    )
    print(
        f"difference {final.difference:+.1f} a scenario,"
        f" 95 % interval [{final.difference_low:+.1f}, {final.difference_high:+.1f}];"
        f" {final.gap_closed:.0%} of the way from base to oracle;"
        f" {report.duration_s / 60:.1f} minutes"
    )
    print("\nWhere to look next:")
    print(f"  {report.plot}")
    command = f"DATABASE_URL= BABYLON_HOME={shlex.quote(report.home)} {_this_command()}"
    print(f"  {command} model list     every policy and its verdict")
    print(f"  {command} windows list   every window and its state")
    print(f"  {report.home}/datasets     the published windows")


def _this_command() -> str:
    """How a shell calls the ``babylon`` beside this Python: after ``make demo`` none is on PATH."""
    command = Path(sys.executable).with_name("babylon")
    here = Path.cwd()
    near = command.relative_to(here) if command.is_relative_to(here) else command
    return shlex.quote(str(near))
