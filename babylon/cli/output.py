"""How every command speaks: results on stdout, everything else on stderr."""

import logging
import sys
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from babylon.errors import BabylonError

stderr = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Exactly one JSON object on stdout."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A table a person can read; numbers to the right, None as a dash."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = any(isinstance(row[index], int | float | tuple) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=index == 0)
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width to respect
        console.width = 160
    console.print(table)


def fail(error: BabylonError, *, json: bool) -> int:
    """One clear line on stderr, the same as JSON where asked; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if json:
        print_json({"error": str(error), "kind": type(error).__name__})
    return 1


def show_logs() -> None:
    """Our own log lines on stderr, between the progress bars."""
    handler = RichHandler(console=stderr, show_path=False, show_level=False, markup=False)
    logger = logging.getLogger("babylon")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return " → ".join(_cell(part) for part in value)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
