"""Output of all commands: results on stdout, everything else on stderr."""

import asyncio
import errno
import getpass
import logging
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from babylon.core.errors import BabylonError, StorageError
from babylon.core.settings import Settings
from babylon.training.update_health import figure

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
# Rich would read [words] and :words: in names and reasons as its own markup.
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)
T = TypeVar("T")
WORD, SHORT = 16, 10  # the id of a window; a date
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_json(value: Any) -> None:
    """Write one JSON object to stdout."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table. Numbers and ``Text`` cells align to the right; ``None`` prints as a dash."""
    table = Table(
        title=printable(title),
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # Rich assumes 80 columns for files and pipes
    cells = [[_cell(value) for value in row] for row in rows]
    shown = [[name, *(str(row[i]) for row in cells)] for i, name in enumerate(columns)]
    kinds = int | float | Text
    numeric = [any(isinstance(row[i], kinds) for row in rows) for i in range(len(columns))]
    between = 2 * (len(columns) - 1)
    widths = _fitted(shown, numeric, console.width - between)
    console.width = max(console.width, sum(widths) + between)
    for column, right, width in zip(columns, numeric, widths, strict=True):
        justify: JustifyMethod = "right" if right else "left"
        table.add_column(column, justify=justify, no_wrap=right, overflow="fold", width=width)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _fitted(columns: Sequence[Sequence[str]], whole: Sequence[bool], room: int) -> list[int]:
    """Return the width of each column. What does not fit is taken from the widest one.

    No column is narrower than its longest word, of which ``WORD`` characters count: Rich would
    print some columns as one letter a line. The first column is broken only if the others do not
    suffice, then a text of ``SHORT`` characters. Of a ``whole`` column nothing may be broken.
    """
    natural = [max(cell_len(line) for t in texts for line in t.split("\n")) for texts in columns]
    widths = [min(width, max(room, WORD)) for width in natural]
    for first, short in ((False, SHORT), (True, SHORT), (True, 0)):
        least = [
            width if whole[i] or (i == 0 and not first) else min(width, WORD, _word(texts, short))
            for i, (width, texts) in enumerate(zip(widths, columns, strict=True))
        ]
        while sum(widths) > room and widths != least:
            spare = [i for i, width in enumerate(widths) if width > least[i]]
            widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def _word(texts: Sequence[str], short: int) -> int:
    """Return the length of the longest word."""
    words = (word for text in texts for word in ([text] if len(text) <= short else text.split()))
    return max(map(cell_len, words), default=0)


def show_values(values: Mapping[str, object], json: bool) -> None:
    """Print one JSON object, or one line for each value."""
    if json:
        print_json(values)
        return
    lines = list(_flat(values))
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        print(printable(f"{name:{width}}  {figure(value)}"))


def printable(text: str) -> str:
    """Return text of play without the control characters that a terminal obeys."""
    return _CONTROL.sub("\ufffd", text)


def fail(error: BabylonError, *, json: bool) -> int:
    """Print the error on one line of stderr, with ``json`` also on stdout. Return exit code 1."""
    print(printable(f"error: {error}"), file=sys.stderr)
    if json:
        print_json({"error": str(error), "kind": type(error).__name__})
    return 1


def is_storage(error: OSError) -> bool:
    """Return whether the error comes from a full, read-only or forbidden file system."""
    return error.errno in _STORAGE


def storage_error(error: OSError) -> StorageError:
    """Turn an error of the file system into one that the user can act on.

    Raises:
        OSError: ``error`` itself, when it has another cause.
    """
    if not is_storage(error):
        raise error
    if isinstance(error, PermissionError):  # it may be read or written: the error does not tell
        return StorageError(
            f"cannot use {error.filename or 'a file'} ({error.strerror}): give this user access to"
            " it, or set BABYLON_HOME to a directory of yours"
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return StorageError(
            f"cannot write {error.filename} ({error.strerror}): a file lies where a directory must"
            " be: move it away, or set BABYLON_HOME or the path to another one"
        )
    return StorageError(
        f"cannot write {error.filename or 'to the disk'} ({error.strerror}):"
        " free disk space, or set BABYLON_HOME to a writable directory"
    )


def show_logs() -> None:
    """Send log records of ``babylon`` to stderr.

    On a terminal, Rich prints them above the progress bars. In a file or pipe each record is one
    line, because a folded path cannot be searched or copied.
    """
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(console=stderr, show_path=False, show_level=False, markup=False)
        handler.addFilter(lambda record: not hasattr(record, "progress"))  # the bars show it
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    logger = logging.getLogger("babylon")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def user_name() -> str:
    """Return the name under which the user's decisions are stored."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have a number only
        return f"uid {os.getuid()}"


def with_store(
    settings: Settings,
    function: Callable[..., Coroutine[Any, Any, T]],
    *arguments: object,
    **options: object,
) -> T:
    """Open the store and return ``await function(store, *arguments, **options)``."""
    from babylon.store import open_store

    async def call() -> T:
        async with open_store(settings) as store:
            return await function(store, *arguments, **options)

    return asyncio.run(call())


def _cell(value: Any) -> str | Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"  # not 1e+03
    return printable(str(value))


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield nested values under dotted names: ``metrics.ess``, ``gateways.0.url``."""
    for name, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, dict) and inner:
            yield from _flat({str(key): one for key, one in inner.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if value in ([], (), {}) else value
