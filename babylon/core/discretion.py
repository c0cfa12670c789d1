"""A server's error message, without anything of what was sent to the server.

Servers quote requests in their errors: a whole prompt, or the key. ``told`` leaves out every word
that occurs in what was sent, so that neither prompt, ground truth nor key gets into an error, a log
or a stored reason.
"""

import json
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from babylon.core.text import redact

_WORD = re.compile(r"\w+")
_USER = re.compile(r"(?<=://)[^\s/@]+@")
_LONGEST = 200  # characters
# Words of error messages. They tell nothing, although a prompt may hold them too.
_ORDINARY = frozenset(
    _WORD.findall(
        """a about account an and api are as at authentication authorization balance be billing by
        can cannot check chat code completion completions content context correct credit
        credits current deployment details does error exceeded exist field filter for
        found from has have in incorrect input insufficient internal invalid is it json
        key length limit limits long management max maximum message messages missing model
        must name not of on only openai or organization overloaded parameter parameters
        permission plan policy prompt provided provider quota range rate reached reduce
        refused request requests required response schema server service supported
        temporarily that the this to token tokens too try type unavailable unknown
        unsupported use user valid value was with you your"""
    )
)


def told(message: str, sent: Iterable[str]) -> str:
    """Return a server's message as one line, with … for each word that was sent to it."""
    known = "\n".join(sent)
    # A server may quote the request as JSON, whose escapes look different.
    known = f"{known}\n{json.dumps(known)}".casefold()

    def keep(word: re.Match[str]) -> str:
        folded = word[0].casefold()
        return word[0] if folded in _ORDINARY or folded not in known else "…"

    # A body that is no text may hold NULs, which the database does not store.
    line = re.sub(r"[\s\0]+", " ", message)[: 4 * _LONGEST]
    shown = re.sub(r"…(?:\W*…)+", "…", _WORD.sub(keep, line))
    return redact(shown)[:_LONGEST].strip().rstrip(".")


def without_passwords(text: str) -> str:
    """Return a text without user and password of the URLs in it."""
    return _USER.sub("********@", text)


def shown_url(url: str) -> str:
    """Return a URL without password and query, which may hold a key."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
