"""Text as Postgres can hold it: a NUL becomes U+FFFD, the replacement character.

A policy may sample a NUL like any other token. The gateway and the recorder both replace it, so
what they store of one call stays equal; the token ids keep what was sampled.
"""

import re

_REPLACEMENT = "\ufffd"
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # not the text \u0000, written \\u0000


def storable(text: str) -> str:
    """``text`` without NUL characters."""
    return text.replace("\0", _REPLACEMENT)


def storable_json(text: str) -> str:
    """The same for JSON, in which a NUL is an escape: equal to encoding the storable strings."""
    if "\\u0000" not in text:  # a hundred times quicker, and nearly always so
        return text
    return _ESCAPED_NUL.sub(rf"\g<1>{_REPLACEMENT}", text)
