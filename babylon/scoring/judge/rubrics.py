"""Rubrics: the text files in ``rubrics/``, or a file of the user.

A changed text is a new rubric. The text is part of every prompt and therefore of every cache key,
and every judgment stores the rubric's name with the digest of its text.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from babylon.core.errors import ConfigError

_BUILT_IN = Path(__file__).parent / "rubrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """The judge's criteria in words. ``version`` is ``name@digest``."""

    name: str
    text: str

    @property
    def version(self) -> str:
        return f"{self.name}@{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


def rubric_names() -> list[str]:
    """Return the names of the built-in rubrics."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.txt"))


def load_rubric(name: str) -> Rubric:
    """Return a rubric by name (``trading-v1``) or by path (any name that ends in ``.txt``).

    Raises:
        ConfigError: the rubric does not exist or is empty.
    """
    path = Path(name) if name.endswith(".txt") else _BUILT_IN / f"{name}.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"JUDGE_RUBRIC={name!r}: no such rubric ({error}): choose"
            f" {', '.join(rubric_names())} or the path of a .txt file"
        ) from error
    if not text:
        raise ConfigError(f"JUDGE_RUBRIC={name!r}: {path} is empty: write the criteria into it")
    return Rubric(name=path.stem, text=text)
