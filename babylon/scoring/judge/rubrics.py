"""Rubrics: versioned text files beside this module, or a file of one's own.

A rubric that changed is another rubric: its text goes into every prompt and so into every cache
key, and its name, with the digest of its text, is stored with every judgment.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from babylon.core.errors import ConfigError

_BUILT_IN = Path(__file__).parent / "rubrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """What the judge is told to look at. ``version`` is ``name@digest``."""

    name: str
    text: str

    @property
    def version(self) -> str:
        return f"{self.name}@{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


def rubric_names() -> list[str]:
    return sorted(path.stem for path in _BUILT_IN.glob("*.txt"))


def load_rubric(name: str) -> Rubric:
    """A rubric by name (``trading-v1``) or by path (anything that ends in ``.txt``).

    Raises:
        ConfigError: there is none, or it is empty.
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
        raise ConfigError(f"JUDGE_RUBRIC={name!r}: {path} is empty: write what the judge looks at")
    return Rubric(name=path.stem, text=text)
