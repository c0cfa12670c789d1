"""How every command speaks: results on stdout, everything else on stderr."""

import errno
import logging
import sys
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from babylon.core.errors import BabylonError, StorageError

_STORAGE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EEXIST,  # a file where a directory must be
    errno.ENOTDIR,
}
stderr = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Exactly one JSON object on stdout."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A table a person can read; numbers (and ready ``Text``) to the right, None as a dash.

    Where the terminal is narrow, texts wrap; the first column and numbers never do.
    """
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for index, column in enumerate(columns):
        numeric = any(isinstance(row[index], int | float | Text) for row in rows)
        whole = numeric or index == 0
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(column, justify=justify, no_wrap=whole, overflow="fold")
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


def is_storage(error: OSError) -> bool:
    """Is the disk full or closed to us?"""
    return error.errno in _STORAGE


def storage_error(error: OSError) -> StorageError:
    """A full disk or a closed place as one line.

    Raises:
        OSError: the same again, when it is about something else: then it is a bug.
    """
    if not is_storage(error):
        raise error
    return StorageError(
        f"cannot write {error.filename or 'to the disk'} ({error.strerror}):"
        " free the disk, or set BABYLON_HOME to a directory of yours that can be written"
    )


def show_logs() -> None:
    """Our own log lines on stderr: between the progress bars, or one a line in a file or pipe,
    where a path that was folded could be neither searched for nor copied."""
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(console=stderr, show_path=False, show_level=False, markup=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    logger = logging.getLogger("babylon")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _cell(value: Any) -> str | Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
