"""The rules that find secrets and personal data in text.

Google's RE2 runs them, at about 300 MB/s: the patterns of the providers' keys come from the library
detect-secrets, whose own scanner reads 0.02 MB/s (decision 31). Seed phrases are found by the words
of BIP 39 (package ``mnemonic``). A pattern that is too weak on its own has a check, such as
``phonenumbers`` for telephone numbers.

Names of people, postal addresses and secrets of unknown form without a telling word before them are
not found.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import phonenumbers
from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from mnemonic import Mnemonic

# Twelve words in a row, the shortest phrase of BIP 39. Prose has words between them that are not.
_SEED_WORDS = "|".join(Mnemonic("english").wordlist)
_ENTROPY_BITS = 4.2  # a character of random base64 has about 5.2 in 40 characters, a path about 3.9
_DIGIT = re.compile(r"\d")
_SEPARATOR = re.compile(r"[ ()\-]+|\.[ ()\-]")  # a point alone is inside an amount
# Not `+1.4155552671`, as registries of domains write a telephone number.
_AMOUNT = re.compile(r"\+(?:\d{4,}\.\d+|\d+\.(?:\d{1,6}|\d{13,}))(?![\d.])")
# The parts of a path or a name: a word, an abbreviation or a number, each with a few digits.
_WORDS = re.compile(r"(?:(?:(?:[A-Z]?[a-z]+|[A-Z]+)\d{0,4}|\d+[a-zA-Z]?)?(?:[/_+\-=]|$))+")
_LINE_END = r"(?:\r?\n|  )"  # the search reads `\n` in JSON as two blanks
_CELL = r"[\w'\"\-]*"  # of a title: prose has blanks
_LETTERS = r"\p{Latin}\p{Greek}\p{Cyrillic}"  # scripts that part words by blanks
_IPV6_GROUPS = 8
_SCHEME_END = r":(?:\\*/){2,4}"
_PORT = re.compile(r"(?i)[${<%]*(?:\d{1,5}|[\w.]*port)[}>]*[/?#\\]")
HEX_KEY = "HEX_KEY"
_TELLING = (
    r"(?:api[_ -]?key|secret(?:[_ -]?key)?|passw(?:or)?d|passphrase"
    r"|(?:access|auth|api|bot|refresh|session)[_ -]?token|(?:db|user|smtp)_pass"
    r"|private[_ -]?key|client[_ -]?secret)"
)
# RE2 has no look-around and repeats at most 1000 times. A boundary says the same here.
_LOOK_AHEAD = re.compile(r"\(\?!(?:\\w|\[[^\]]*\])\)")
_OTHER = {r"(?:(?<=\W)|(?<=^))": r"(?:\W|^)", r"(?<=\W)": r"\W", "{50,1024}": "{50,}"}
_ELSEWHERE = {"Public IP (ipv4)", "Private Key", "Secret Keyword"}  # own rules find more of these


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of secret. ``holds`` decides about a match; ``name`` stands in its place."""

    name: str
    pattern: str
    holds: Callable[[str], bool] = lambda _: True


def _is_phone(text: str) -> bool:
    """True for a telephone number, also with digits of something else behind a separator."""
    if _AMOUNT.match(text):
        return False
    ends = (match.start() for match in _SEPARATOR.finditer(text))
    return _phone(text, phonenumbers.is_possible_number) or any(
        _phone(text[:end], phonenumbers.is_valid_number) for end in ends
    )


def _phone(text: str, holds: Callable[[phonenumbers.PhoneNumber], bool]) -> bool:
    try:
        return holds(phonenumbers.parse(text, None if text.startswith("+") else "US"))
    except phonenumbers.NumberParseException:
        return False


def _is_address(text: str) -> bool:
    """True for an address, also with one group too many: ``ip:`` before it, a port behind it."""
    groups = text.split(":")
    told = [text, text.removeprefix(":")]
    if len(groups) == _IPV6_GROUPS + 1:
        told += [":".join(groups[1:]), ":".join(groups[:-1])]
    return any(map(_is_ip, told))


def _is_ip(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _is_random(text: str) -> bool:
    """True for a text of mixed characters that looks drawn at random, and is no path of words."""
    kinds = (str.isupper, str.islower, str.isdigit)
    if not all(any(map(kind, text)) for kind in kinds) or _WORDS.fullmatch(text):
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) > _ENTROPY_BITS


def _is_base58(text: str) -> bool:
    return any(map(str.isupper, text)) and any(map(str.islower, text)) and bool(_DIGIT.search(text))


def _is_mixed(text: str) -> bool:
    return bool(_DIGIT.search(text)) and not text.replace("_", "").isdigit()


def _is_no_port(text: str) -> bool:
    """False for an address whose colon is that of its port, with an ``@`` further on."""
    return not _PORT.match(text.lstrip(":/\\").partition(":")[2])


def _is_bytes(text: str) -> bool:
    return all(int(one) < 256 for one in re.findall(r"\d+", text))


def _has_digit(text: str) -> bool:
    return bool(_DIGIT.search(text))


OWN = (
    Rule(
        "PRIVATE_KEY",
        r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\z)",
    ),
    Rule("PRIVATE_KEY", r"PuTTY-User-Key-File-\d"),
    # As Solana writes it: 64 bytes.
    Rule("PRIVATE_KEY", r"\[\s*(?:\d{1,3}\s*,\s*){63}\d{1,3}\s*\]", _is_bytes),
    Rule(
        "EMAIL", rf"[{_LETTERS}\d._%+\-]+@[{_LETTERS}\d](?:[{_LETTERS}\d\-]*\.)+[{_LETTERS}]{{2,}}"
    ),
    Rule("API_KEY", r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}", _has_digit),
    Rule("API_KEY", r"\b(?:hf|github_pat|glpat|xai|gsk|r8|nvapi|pplx)[_-][A-Za-z0-9_\-]{16,}"),
    Rule("API_KEY", r"\bAIza[A-Za-z0-9_\-]{30,}"),
    Rule("API_KEY", r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    Rule("API_KEY", r"(?i)\bbearer\s+[A-Za-z0-9._~+/\-]{16,}=*", _has_digit),
    # user:password@ of a URL. JSON may write `\/`, which the search reads as `//`.
    Rule("PASSWORD", rf"{_SCHEME_END}[^\s:/?#@]*:[^\s/?#@]+@"),
    Rule("PASSWORD", rf"{_SCHEME_END}[^\s:/?#@\[]*:[^\s'\"<>]+@", _is_no_port),
    Rule(
        "PASSWORD",
        r"(?i)\bauthorization[\\'\"\s]*[:=][\\'\"\s]*basic\s+[A-Za-z0-9+/]{6,}=*",
    ),
    Rule(
        "PASSWORD",
        # JSON inside a text has escaped quotes, JSON inside that one has backslashes too. An arrow
        # without a quote behind it is a function of a program.
        rf"(?i){_TELLING}"
        r"(?:[\\'\"\s*_`]*(?:[:=]+|=+>[\\\s]*['\"]|\bis:)|[\\'\"\s]*\bis\b)[\\'\"\s*_`]*"
        r"[^\s'\",;{}\[\]]{6,}",
    ),
    # `PWD` alone is the working directory.
    Rule("PASSWORD", r"(?i)\bpwd[\\'\"\s]*[:=][\\'\"\s]*[^\s'\",;{}\[\]/]{6,}"),
    Rule("PASSWORD", rf"(?i)--(?:{_TELLING}|token)\s+[^\s'\",;{{}}\[\]]{{6,}}", _has_digit),
    # The next cell of a table, what a tag encloses, or behind an arrow. A title has no digit.
    Rule(
        "PASSWORD",
        rf"(?i){_TELLING}[\\'\"\s*_`]*(?:\||-?>)[\\'\"\s*_`]*[^\s'\",;{{}}\[\]|<>]{{6,}}",
        _has_digit,
    ),
    # All rows below the title of a column: of a table of Markdown, and of one with separators.
    Rule(
        "PASSWORD",
        rf"(?im){_TELLING}[^\n]*{_LINE_END}[ \t]*\|?[ \t:]*-+[ \t:\-]*\|[ \t:|\-]*{_LINE_END}"
        r"(?:[^\n]*\|[^\n]*(?:\n|\z))+",
        _has_digit,
    ),
    Rule(
        "PASSWORD",
        rf"(?im)(?:^|\"|  )(?:(?:{_CELL}[,;\t])+{_CELL}{_TELLING}|{_CELL}{_TELLING}{_CELL}[,;\t])"
        rf"[\w'\"\-,;\t]*{_LINE_END}"
        r"(?:[^\n]*[,;\t][^\n]*(?:\n|\z))+",
        _has_digit,
    ),
    Rule("WALLET", r"\b0[xX][0-9a-fA-F]{64}\b"),
    Rule("WALLET", r"\b0[xX][0-9a-fA-F]{40}\b"),
    Rule("WALLET", r"\bbc1[a-z0-9]{25,59}\b"),
    Rule("WALLET", r"\b[1-9A-HJ-NP-Za-km-z]{26,88}\b", _is_base58),
    Rule(
        "SEED_PHRASE",
        rf"(?i)(?:\b|_)(?:(?:{_SEED_WORDS})[\s,.;:\d()\-'\"\\*|_/`>]{{1,9}}){{11,}}"
        rf"(?:{_SEED_WORDS})(?:\b|_)",
    ),
    Rule("API_KEY", r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{4,}(?:\.[A-Za-z0-9_\-]*)?"),
    Rule("PHONE", r"\+\d[\d ().\-]{7,18}\d", _is_phone),
    Rule("PHONE", r"\(\d{3}\) ?\d{3}[-. ]\d{4}\b|\b\d{3}[-. ]\d{3}[-. ]\d{4}\b", _is_phone),
    # Digits alone may be an amount or a time; as a number of JSON they have no sign of a telephone.
    Rule(
        "PHONE",
        r"(?i)(?:phone|mobile|whatsapp)(?:[ _-]?(?:number|no))?[\\'\"\s]*[:=]+[\\'\"\s]*"
        r"\+?\d{9,15}\b",
    ),
    Rule("IP", r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", _is_address),
    Rule("IP", r"(?:[0-9a-fA-F]{0,4}:){2,8}[0-9a-fA-F]{1,4}", _is_address),
    Rule("HIGH_ENTROPY", r"[A-Za-z0-9+/_\-]{40,}={0,2}", _is_random),
    # Wallets' private keys and the keys of W&B have no prefix, and too few kinds of characters.
    Rule(
        HEX_KEY,
        r"(?:\b|_)(?:(?:0[xX])?(?:[0-9a-fA-F]{40}|[0-9a-fA-F]{64})(?:\b|_))+",
        _is_mixed,
    ),
)


def _of_detect_secrets() -> Iterator[Rule]:
    for kind, plugin in sorted(get_mapping_from_secret_type_to_class().items()):
        patterns = getattr(plugin, "denylist", ())
        if kind in _ELSEWHERE or not isinstance(patterns, list | tuple):
            continue
        for pattern in patterns:
            text = _LOOK_AHEAD.sub(r"\\b", pattern.pattern)
            for theirs, ours in _OTHER.items():
                text = text.replace(theirs, ours)
            insensitive = "(?i)" if pattern.flags & re.IGNORECASE else ""
            yield Rule("API_KEY", insensitive + text, _has_digit)


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, the own ones first."""
    return (*OWN, *_of_detect_secrets())
