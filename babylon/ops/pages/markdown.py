"""Markdown for Prefect's pages. Text of play and of judges is hostile: it stays in code spans."""

from base64 import b64encode
from collections.abc import Iterable, Sequence

MOST_CHARS = 400  # of a judge's reason on a page


def span(text: object) -> str:
    """Return foreign text as a code span on one line, in which no Markdown or HTML has effect."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(text).split()))
    if len(line) > MOST_CHARS:
        line = line[: MOST_CHARS - 1] + "…"
    plain = line.replace("`", "'").replace("|", "¦")
    return f"`{plain}`" if plain else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, with an empty line after it; none without rows.

    The first column aligns to the left, as do columns whose name begins with ``<``. Cells are our
    own text, or were made by ``span``.
    """
    marks = ["---" if at == 0 or name[0] == "<" else "---:" for at, name in enumerate(columns)]
    lines = [
        f"| {' | '.join('–' if cell is None else str(cell) for cell in row)} |" for row in rows
    ]
    if not lines:
        return []
    head = " | ".join(name.removeprefix("<") for name in columns)
    return [f"| {head} |", f"| {' | '.join(marks)} |", *lines, ""]


def picture(words: str, image: bytes | None) -> list[str]:
    """Return the lines that show an SVG or PNG in the page itself; none without an image."""
    if not image:
        return []
    return [f"![{words}]({data_uri(image)})", ""]


def data_uri(image: bytes) -> str:
    """Return a PNG or SVG as an address that holds it."""
    kind = "png" if image.startswith(b"\x89PNG") else "svg+xml"
    return f"data:image/{kind};base64,{b64encode(image).decode()}"
