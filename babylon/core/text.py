"""Text without what must not be stored or sent: NULs, which Postgres rejects, and secrets.

A policy may sample a NUL like any other token. The gateway and the recorder both replace it by
U+FFFD, so that their records of a call stay equal; the token ids keep the sampled token.

Secrets are found by their form. Some forms belong to secrets only: a provider's key prefix, a
private key's banner, a password in a URL. A long run of mixed letters and digits also counts as a
secret, because a needless replacement costs a word and a missed one costs a key. UUIDs and wallet
addresses are public. A sender redacts first, then checks the result with ``find_secrets``, and
sends nothing if a secret is still found.
"""

import re
from collections.abc import Iterable

_REPLACEMENT = "\ufffd"
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # not the text \u0000, written \\u0000
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, flags))
    for name, pattern, flags in (
        (
            "private-key",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        ("password", r"(?<=://)(?!\[REDACTED)[^\s/:@]*:[^\s/@]+(?=@)", 0),
        (
            "password",
            r"(?<![A-Za-z0-9])(?:password|passwd|pwd|passphrase|api[_-]?key|private[_-]?key"
            r"|access[_-]?token|auth[_-]?token|client[_-]?secret|secret[_-]?(?:access[_-]?)?key)"
            r"\b[\\\"']*\s*[:=]\s*[\\\"']*+(?!\[REDACTED)[^\s\\\"',;]{6,}",
            re.IGNORECASE,
        ),
        ("token", r"\bbearer\s+(?!\[REDACTED)[\w.~+/-]{16,}=*", re.IGNORECASE),
        # From the beginning of the word, because each "eyJ" in it would read the word to its end.
        (
            "token",
            r"(?<![\w-])(?=[\w-]*\beyJ[\w-]{8})[\w-]++\.[\w-]{8,}+\.[\w-]*",
            0,
        ),
        (
            "key",
            r"\b(?:(?:sk|pk|rk)[-_][\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
            r"|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{30,}|wandb_v\d_\w{16,})",
            0,
        ),
        ("email", r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}", 0),
        ("key", r"\b(?:0x)?[0-9a-fA-F]{64}\b|(?<![0-9a-fA-Fx])[0-9a-fA-F]{40}\b", 0),
        (
            "key",
            r"(?<![A-Za-z0-9+])(?!0x[0-9a-fA-F]{40}\b)(?=[A-Za-z0-9+]*[0-9])(?=[A-Za-z0-9+]*[a-z])(?=[A-Za-z0-9+]*[A-Z])"
            r"[A-Za-z0-9+]{32,}={0,2}",
            0,
        ),
    )
)


def storable(text: str) -> str:
    """Return ``text`` with U+FFFD for each NUL."""
    return text.replace("\0", _REPLACEMENT)


def storable_json(text: str) -> str:
    """Return JSON with U+FFFD for each escaped NUL, as if ``storable`` strings were encoded."""
    if "\\u0000" not in text:  # a hundred times quicker than the pattern, and nearly always true
        return text
    return _ESCAPED_NUL.sub(rf"\g<1>{_REPLACEMENT}", text)


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Return the text with ``[REDACTED:kind]`` for each secret; ``known`` are further secrets."""
    for secret in sorted(known, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, "[REDACTED:key]")
    for name, form in _FORMS:
        text = form.sub(f"[REDACTED:{name}]", text)
    return text


def find_secrets(text: str, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the kinds of the secrets in a text, never the secrets themselves."""
    kinds = ["key" for secret in known if secret in text]
    kinds += [name for name, form in _FORMS if form.search(text)]
    return tuple(dict.fromkeys(kinds))


def is_deeper(value: object, levels: int) -> bool:
    """True if a decoded JSON value is nested more than ``levels`` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
