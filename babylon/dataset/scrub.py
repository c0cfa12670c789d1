"""Scrubbing of a row: every text is searched, and what a rule finds is replaced by its name.

A row is published as it is, or scrubbed, or not at all. A scrubbed row carries no token ids,
because they decode to the secret. A row is refused if its ids hold a secret or if the replaced text
still does.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
import re2

from babylon.core.errors import BabylonError
from babylon.dataset.secret_rules import Rule, rules

_BREAK = "\n\x1e\n"  # between texts, so that no rule matches across two of them
_ESCAPES = (("\\n", "  "), ("\\r", "  "), ("\\t", "  "), ('\\"', ' "'), ("\\/", "//"))
_CODED = re2.compile(
    r"\\u(?:00[2-7][0-9a-fA-F]|00[aA][dD]|20[0-6][0-9a-fA-F]|[fF][eE](?:6[bB]|[fF][fF])"
    r"|[fF][fF][0-5][0-9a-fA-F])"
)
# Characters that show as a letter, digit or sign of ASCII, or not at all.
_WIDE = {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)} | {0xFE6B: "@"}
_INVISIBLE = (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_SHOWN = {chr(code): shown for code, shown in (_WIDE | dict.fromkeys(_INVISIBLE, "")).items()}
ESCAPED = "ESCAPED"
NESTED = "NESTED"
_JSON_COLUMNS = ("_json", "arguments")


class ScrubError(BabylonError):
    """A row that cannot be made safe. The message names the row and the rule, never the secret."""


class _Search:
    """All rules as one automaton that says which of them may match."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        options = re2.Options()
        options.max_mem = 256 << 20
        options.log_errors = False
        self._set = re2.Set.SearchSet(options)
        for rule in rules:
            self._set.Add(rule.pattern)
        self._set.Compile()
        self._rules = [(rule, re2.compile(rule.pattern, options)) for rule in rules]

    def spans(self, text: str) -> list[tuple[int, int, str]]:
        """Return (start, end, rule) of every finding, unsorted."""
        plain = _plain(text)
        return [
            (*match.span(), rule.name)
            for index in self._set.Match(plain) or ()
            for rule, pattern in [self._rules[index]]
            for match in pattern.finditer(plain)
            if rule.holds(match.group())
        ]


@cache
def _search() -> _Search:
    return _Search(rules())


def _plain(text: str) -> str:
    """Return the text with JSON's escapes as blanks; every position stays where it is."""
    if "\\" in text:
        for escape, blank in _ESCAPES:
            text = text.replace(escape, blank)
    return text


def found(texts: Iterable[str]) -> frozenset[str]:
    """Return the names of the rules that find something in any of the texts."""
    joined = _BREAK.join(texts)
    spans = _search().spans(joined)
    names = {name for _, _, name in spans}
    if _hidden(joined, len(spans)):
        names.add(ESCAPED)
    return frozenset(names)


def _hidden(text: str, known: int = 0) -> bool:
    """Return True if more secrets than ``known`` show once escapes of characters (``\\u0040`` is @)
    are decoded, wide characters (＠) are narrow, and invisible ones are left out."""
    shown = (
        _CODED.sub(lambda match: chr(int(match.group()[2:], 16)), text) if "\\u" in text else text
    )
    if not shown.isascii():
        for letter in _SHOWN.keys() & set(shown):
            shown = shown.replace(letter, _SHOWN[letter])
    return shown != text and len(_search().spans(shown)) > known


def scrub(text: str) -> str:
    """Return the text with every finding replaced by ``[RULE]``; ``[ESCAPED]`` if one is hidden."""
    spans = sorted(_search().spans(text))
    parts: list[str] = []
    end = 0
    for start, stop, name in spans:
        if start >= end:
            parts += [text[end:start], f"[{name}]"]
        end = max(end, stop)
    clean = "".join((*parts, text[end:])) if spans else text
    return f"[{ESCAPED}]" if _hidden(clean) else clean


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text inside a row; names of columns are ours and left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_of(item)
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        for item in value:
            yield from texts_of(item)


def cleaned(value: Any, column: str = "") -> Any:
    """Return a copy of the value in which every text is scrubbed. Columns of JSON stay JSON."""
    if isinstance(value, str):
        return _clean_json(value) if column.endswith(_JSON_COLUMNS) else scrub(value)
    if isinstance(value, dict):
        return {name: cleaned(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return [cleaned(item, column) for item in value]
    return value


def _clean_json(text: str) -> str:
    """Scrub each text of a document; if two of them tell a secret together, scrub the whole.

    A document that is nested too deep to be searched is replaced.
    """
    try:
        clean = msgspec.json.encode(_inside(msgspec.json.decode(text))).decode()
    except msgspec.DecodeError:
        return scrub(text)
    except RecursionError:  # a model's or a client's arguments: their depth has no bound
        return msgspec.json.encode(f"[{NESTED}]").decode()
    if not (names := found([clean])):
        return clean
    clean = scrub(clean)
    try:
        msgspec.json.decode(clean)
    except msgspec.DecodeError:
        return msgspec.json.encode(f"[{min(names)}]").decode()
    return clean


def _inside(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(name): _inside(item) for name, item in value.items()}
    return [_inside(item) for item in value] if isinstance(value, list) else value
