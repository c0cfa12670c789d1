"""Modules that an import loads in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_with(*modules: str) -> set[str]:
    """Return the names that importing ``modules`` adds to those of a fresh interpreter."""
    code = f"import sys; old = {{*sys.modules}}; import {', '.join(sorted(modules))}"
    finished = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*{{*sys.modules}} - old)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(finished.stdout.split())
