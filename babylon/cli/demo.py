"""``babylon demo``: run it with progress on stderr, then print a table and the result."""

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from babylon.cli.output import print_table, stderr
from babylon.cli.training_report import window_table
from babylon.core.home import Home
from babylon.core.settings_loading import load_settings
from babylon.core.types import WindowResult
from babylon.ops.demo import GAMES, DemoReport, Say, Step, demo_overrides, run_demo

_NO_PART = ("GAME_DATABASE_URL", "ARTIFACT_STORE")  # of a demo, also if they are exported


def run(
    home: Home, seed: int, base: str | None, rules: str, windows: int | None, shared: bool
) -> DemoReport:
    """Play and train ``windows`` hours, or the game's own number, in a new home below ``home``."""
    from babylon.flows.train_window import train_window

    game = GAMES[rules]
    overrides = demo_overrides(home, seed, datetime.now(UTC), game, base)
    settings = load_settings(**overrides)

    async def train(window_id: str) -> WindowResult:
        return await train_window(window_id, overrides)

    with demo_progress() as (say, step):
        return asyncio.run(
            run_demo(
                settings,
                home.models,
                game,
                windows=windows or game.windows,
                shared=shared,
                train=train,
                say=say,
                step=step,
            )
        )


def rehearse(
    home: Home, seed: int, base: str | None, rules: str, windows: int | None, shared: bool
) -> DemoReport:
    """Start the services in a new home below ``home``, and play and train there in real time."""
    from babylon.ops.rehearsal import WINDOWS, run_rehearsal

    game = GAMES[rules]
    settings = load_settings(**demo_overrides(home, seed, datetime.now(UTC), game, base, live=True))
    with demo_progress() as (say, step):
        return asyncio.run(
            run_rehearsal(
                settings,
                home.models,
                game,
                windows=windows or WINDOWS,
                shared=shared,
                say=say,
                step=step,
            )
        )


@contextmanager
def demo_progress() -> Iterator[tuple[Say, Step]]:
    """Yield two functions that print a line and draw a step's bar, on stderr.

    Bars are drawn only on a terminal.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def step(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done)

        yield stderr.print, step


def print_demo(report: DemoReport, live: bool = False) -> None:
    """Print the table of hours, the comparison of base and final policy, and what to look at.

    ``live``: the services still run.
    """
    columns, rows = window_table(report.windows)
    print_table("Hour by hour (P&L and win rate on the gate's unseen scenarios)", columns, rows)
    final = report.final
    print_table(
        f"Base and final policy on {final.scenarios} scenarios that were never trained on",
        ["", "P&L", "win rate"],
        [
            ["base model", final.pnl_base, final.win_rate_base],
            ["base model, taught the best plays", final.pnl_sft, None],
            [f"policy v{report.policy_version}", final.pnl_final, final.win_rate_final],
            [f"best scripted rule, {final.rule}", final.pnl_rule, None],
            ["oracle", final.pnl_oracle, None],
        ],
    )
    print(
        f"difference {final.difference:+.1f} a scenario,"
        f" 95 % interval [{final.difference_low:+.1f}, {final.difference_high:+.1f}];"
        f" {final.gap_closed:.0%} of the way from base to the best rule;"
        f" {report.duration_s / 60:.1f} minutes"
    )
    _print_where_to_look(report, live)


def _print_where_to_look(report: DemoReport, live: bool) -> None:
    print("\nWhere to look next:")
    print(f"  {report.plot}")
    unset = ["DATABASE_URL=", *(f"{name}=" for name in _NO_PART if os.environ.get(name))]
    command = f"{' '.join(unset)} BABYLON_HOME={shlex.quote(report.home)} {_this_command()}"
    print(f"  {command} model list     every policy and its verdict")
    print(f"  {command} windows list   every window and its state")
    print(f"  {report.home}/datasets     the published windows")
    if live:
        print(f"  {command} down           stops the services, which still run")


def _this_command() -> str:
    """Return the shell word for the ``babylon`` beside this Python, which may not be on PATH."""
    command = Path(sys.executable).with_name("babylon")
    here = Path.cwd()
    near = command.relative_to(here) if command.is_relative_to(here) else command
    return shlex.quote(str(near))
