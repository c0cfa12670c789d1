"""Agents' text inside a prompt: escaped, cut visibly, and counted.

Whatever agents and markets wrote is data. ``escape`` leaves it no ``<`` to close a block or open a
chat-template token with (``‹`` stands for it, which costs less than an entity), and no line break
to start a line of its own with. Nothing is cut
silently: ``shorten`` says how many characters are missing.
"""

import re
from functools import lru_cache
from math import ceil

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]+")
_PIECES = re.compile(r"[A-Za-z]+|[0-9]|[^\x00-\x7f]|[^\sA-Za-z0-9]|\s+")


def escape(text: str) -> str:
    """One line in which no tag begins."""
    return one_line(text).replace("<", "‹")


def one_line(text: str) -> str:
    """Without line breaks, control characters and marks that change the direction of text."""
    return _CONTROL.sub(" ", text).strip()


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters of the beginning and the end, and how many are left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit - limit * 2 // 3
    left_out = len(text) - head - tail
    return f"{text[:head]} [{left_out} characters left out] {text[len(text) - tail :]}"


@lru_cache(maxsize=256)  # texts are counted alone, in their block and in every prompt
def count_tokens(text: str) -> int:
    """An upper estimate without a tokenizer: four ASCII letters a token, each digit, mark and run
    of spaces one, each other character as many as it has UTF-8 bytes. Byte-pair vocabularies of
    current models stay below it on prose, JSON and numbers; byte-level ones do not.
    """
    total = 0
    for piece in _PIECES.findall(text):
        if piece[0].isascii():
            total += ceil(len(piece) / 4) if piece[0].isalpha() else not piece.isspace() or 1
        else:
            total += len(piece.encode(errors="surrogatepass"))
    return total
