"""Modules that an import loads in a fresh interpreter."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_with(*modules: str, after: Sequence[str] = ()) -> set[str]:
    """Return the names that importing ``modules`` adds to those that ``after`` loads."""
    first, then = (", ".join(["sys", *sorted(names)]) for names in (after, modules))
    code = f"import {first}; old = {{*sys.modules}}; import {then}; print(*{{*sys.modules}} - old)"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(finished.stdout.split())
